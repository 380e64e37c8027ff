# SPDX-License-Identifier: Apache-2.0
"""Host memory that is full takes the pages that SGLang's own tree is about to evict, and not those
that it has anyway."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang_world import same  # type: ignore[import-not-found]

from flexkv_sglang import hooks
from flexkv_sglang.hashes import PageHashes
from integration.sglang.with_sglang.linked import PAGE, LinkedRank

_PROMPT = 4 * PAGE
"""Tokens of a prompt. SGLang's pool has 8 prompts, of which FlexKV keeps less than one free or
stored elsewhere; host memory has 2."""
_HOST_BYTES = 2 * 4 * 4096


def tokens_of(prompt: str) -> list[int]:
    return list(range(100 * ord(prompt), 100 * ord(prompt) + _PROMPT))


class World:
    """SGLang's tree above host memory that the prompts a and b fill."""

    def __init__(self, folder: Path) -> None:
        settings = {"cpu_cache_gb": _HOST_BYTES / 2**30, "always_load": True}
        self.linked = LinkedRank(folder, settings=settings)
        self.bytes: dict[str, list[torch.Tensor]] = {}
        self.compute("ab")

    def compute(self, prompts: str) -> None:
        """SGLang computes prompts and evicts as much as it must."""
        for prompt in prompts:
            short = _PROMPT - self.linked.slots.available_size()
            if short > 0:
                self.linked.tree.evict(EvictParams(num_tokens=short))
            self.bytes[prompt] = self.linked.compute(tokens_of(prompt), seed=ord(prompt))
            self.linked.tree.check_hicache_events()
            self.linked.settle()

    def in_host(self, prompts: str) -> str:
        """Those of the prompts whose pages are all in host memory."""
        return "".join(each for each in prompts if self._found(each) == _PROMPT // PAGE)

    def load(self, prompt: str) -> bool:
        """A request loads all pages of a prompt. Returns whether the bytes are right."""
        request = self.linked.request(prompt, [*tokens_of(prompt), 1])
        loaded, served, found = self.linked.run(request)
        return loaded == _PROMPT and served and same(found, self.bytes[prompt])

    def _found(self, prompt: str) -> int:
        hashes = get_storage_hash_str(RadixKey(array("q", tokens_of(prompt))), None, page_size=PAGE)
        side = self.linked.rank.side
        assert side._cache is not None
        found: int = side._cache.lookup(side.keys_of(hashes))
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.linked.close()


def test_host_memory_keeps_what_sglang_evicts_and_lacks_what_sglang_has(world: World) -> None:
    assert world.in_host("ab") == "ab"
    world.compute("cdefgh")
    assert world.in_host("abcdefgh") == "ab"
    world.compute("i")  # in the place of a
    assert world.in_host("abcdefghi") == "ab"
    assert world.load("a")


def test_pages_are_in_host_memory_before_sglang_evicts_them(world: World) -> None:
    world.compute("cdefghij")
    assert "c" in world.in_host("cdefghij")
    assert world.in_host("defghij") == ""
    world.compute("k")  # in the place of c
    assert world.load("c")


def test_a_use_delays_an_offload_further(world: World) -> None:
    world.compute("cdefg")
    world.compute("c")
    world.compute("hij")
    assert world.in_host("cdefghij") == "d"


def test_what_a_request_is_to_retain_waits_for_no_eviction(world: World) -> None:
    request = world.linked.request("r", [*tokens_of("d"), 1])
    request.sampling_params.custom_params = {"flexkv.retain_seconds": 60}
    requests = world.linked.rank.requests
    requests.matched(request, 0)
    requests.scheduled([request], [], PageHashes(world.linked.tree))
    world.compute("cd")
    assert "d" in world.in_host("cd")


def test_pages_that_sglang_evicts_at_once_are_a_miss(world: World) -> None:
    world.compute("cdefgh")
    world.linked.tree.evict(EvictParams(num_tokens=8 * _PROMPT))
    world.compute("ijklmnopq")
    assert world.in_host("cdefgh") == ""
    assert not world.linked.rank.side.boundary.failures


def test_pages_go_to_host_memory_before_sglang_sleeps(world: World) -> None:
    world.compute("cdefgh")

    def release(updater: object, request: object) -> None:
        world.linked.forget()

    hooks.release_memory(release, None, SimpleNamespace(tags=["kv_cache"]))
    assert world.in_host("cdefgh") == "gh"
    assert world.load("h")


def test_a_flush_ends_what_waits(world: World) -> None:
    world.compute("cdefgh")
    world.linked.forget()
    world.compute("ij")
    assert world.in_host("cdefgh") == ""
