# SPDX-License-Identifier: Apache-2.0
"""SGLang's own tree tells what pages are, FlexKV which of its tiers has them; without an engine."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
)
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang_world import PATIENCE_SECONDS, Rank  # type: ignore[import-not-found]

from flexkv import CacheConfig
from flexkv.service.server import NodeServer
from flexkv_sglang.events import Page, follow
from integration.sglang.with_sglang.linked import LAYERS, LinkedRank
from packages.inside import cache_of, stores_of

PAGE = 4
TOKENS = list(range(12))
CPU = StorageMedium.CPU


class World:
    """SGLang's tree and pool, and FlexKV beside them."""

    def __init__(self, folder: Path) -> None:
        pool = MHATokenToKVPool(16 * PAGE, PAGE, torch.float16, 1, 8, 1, "cpu", False)
        self.rank = Rank(folder, pool=pool, heads=1)
        self.rank.side.watch()
        allocator = PagedTokenToKVPoolAllocator(16 * PAGE, PAGE, torch.float16, "cpu", pool, False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(4, 64, "cpu", False),
                token_to_kv_pool_allocator=allocator,
                page_size=PAGE,
                enable_kv_cache_events=True,
                tree_components=(ComponentType.FULL,),
            )
        )
        self._slots = allocator

    def insert(self, tokens: list[int], **whose: str) -> None:
        """A request has computed these tokens, and its pages are stored."""
        key = RadixKey(array("q", tokens), **whose)
        slots = self._slots.alloc(len(tokens))
        self.tree.insert(InsertParams(key=key, value=slots))
        hashes = get_storage_hash_str(key, None, page_size=PAGE)
        assert self.rank.store(hashes, [int(slot) // PAGE for slot in slots[::PAGE]])

    def events(self) -> list[Any]:
        """Of FlexKV's tiers, behind those of the tree."""
        of_tree = self.tree.take_events()
        found = follow(of_tree, self.rank.side.events, PAGE)
        assert found[: len(of_tree)] == of_tree
        return found[len(of_tree) :]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.rank.close()


def test_a_stored_page_is_told_as_sglang_tells_it(world: World) -> None:
    world.insert(TOKENS[:8])
    world.insert(TOKENS)
    of_tree = world.tree.take_events()
    assert isinstance(of_tree[0], AllBlocksCleared)
    numbers = [n for event in of_tree[1:] for n in event.block_hashes]
    assert len(numbers) == 3
    (event,) = follow(of_tree, world.rank.side.events, PAGE)[len(of_tree) :]
    assert isinstance(event, BlockStored)
    assert (event.medium, event.block_hashes, event.token_ids) == (CPU, numbers, TOKENS)
    assert (event.parent_block_hash, event.block_size) == (None, PAGE)
    assert world.events() == []


@pytest.mark.parametrize("whose", [{"extra_key": "A"}, {"cache_salt": "A"}])
def test_what_belongs_to_a_tenant_is_not_told(world: World, whose: dict[str, str]) -> None:
    world.insert(TOKENS, **whose)
    assert world.events() == []


def test_after_a_flush_pages_are_told_again(world: World) -> None:
    world.insert(TOKENS)
    first = world.events()
    world.tree.reset()
    assert world.events() == first


def test_pages_wait_until_sglang_has_told_of_one(world: World) -> None:
    """SGLang publishes before anybody can have subscribed to a server that starts."""
    world.insert(TOKENS)
    cleared, *stored = world.tree.take_events()
    assert isinstance(cleared, AllBlocksCleared)
    numbers = [number for event in stored for number in event.block_hashes]
    tokens = [TOKENS[start : start + PAGE] for start in range(0, len(TOKENS), PAGE)]
    events = world.rank.side.events
    events.learn(map(Page, numbers, [None, *numbers], tokens), (), cleared=False)  # as of a disk
    assert follow([cleared], events, PAGE) == [cleared]
    *of_tree, event = follow(stored, events, PAGE)
    assert (of_tree, event.medium, event.token_ids) == (stored, CPU, TOKENS)


def test_other_weights_end_all_pages(world: World) -> None:
    world.insert(TOKENS)
    (stored,) = world.events()
    world.rank.side.weights_changed(flushed=True)
    (removed,) = world.events()
    assert isinstance(removed, BlockRemoved)
    assert (removed.medium, removed.block_hashes) == (CPU, stored.block_hashes)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """Directory of a node's service."""
    root, run = str(tmp_path / "service"), str(tmp_path / "run")
    server = NodeServer(root, CacheConfig(runtime_dir=run, cpu_cache_gb=1 / 256))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield root
    server.stop()
    thread.join()
    server.close(0)


def test_other_engines_tell_of_pages_as_soon_as_they_are_stored(
    tmp_path: Path, service: str
) -> None:
    """Also if SGLang has not published its own events yet."""
    settings = {"service": service}
    linked = LinkedRank(tmp_path, settings=settings, events=True)
    pool = MHATokenToKVPool(16 * PAGE, PAGE, torch.float16, 1, 8, LAYERS, "cpu", False)
    other = Rank(tmp_path, pool=pool, heads=1, settings=settings)
    other.side.watch()
    # Until an engine has told of a page, it tells of none of FlexKV's.
    follow([BlockStored([1], None, [0] * PAGE, PAGE, None)], other.side.events, PAGE)
    deadline = time.monotonic() + PATIENCE_SECONDS
    for each in (linked.rank, other):
        while not stores_of(cache_of(each.side)).free:
            assert time.monotonic() < deadline
            each.side.ended_offloads()
    linked.compute(TOKENS, seed=1)
    linked.settle()
    told: list[Any] = []
    while sum(len(event.block_hashes) for event in told) < len(TOKENS) // PAGE:
        assert time.monotonic() < deadline
        other.side.ended_offloads()
        told += follow([], other.side.events, PAGE)
    published = linked.tree.take_events()
    of_device = [each for each in published if getattr(each, "medium", CPU) != CPU]
    linked.close()
    other.close()
    assert {each.medium for each in told} == {CPU}
    (stored,) = of_device
    assert isinstance(stored, BlockStored)
    assert [n for each in told for n in each.block_hashes] == stored.block_hashes
    assert [token for each in told for token in each.token_ids] == stored.token_ids == TOKENS
    assert sum(isinstance(each, AllBlocksCleared) for each in published) == 1
