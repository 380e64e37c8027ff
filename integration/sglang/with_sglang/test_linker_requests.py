# SPDX-License-Identifier: Apache-2.0
"""SGLang's own tree and requests say which prompts are computed; without an engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_requests import Grammars  # type: ignore[import-not-found]
from sglang_world import Rank  # type: ignore[import-not-found]

from flexkv import KVCache
from flexkv.eviction import RequestContext
from flexkv.types.tenants import tenant_number
from flexkv_sglang import hooks
from flexkv_sglang.hashes import PageHashes, missing_pages

PAGE = 4
PROMPT = list(range(21))


class World:
    """SGLang's tree and pool, and FlexKV beside them.

    Attributes:
        told: what the cache was told of requests: keys of hits, context, and keys of the prompt.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        pool = MHATokenToKVPool(16 * PAGE, PAGE, torch.float16, 1, 8, 1, "cpu", False)
        self.rank = Rank(folder, pool=pool, heads=1)
        self.told: list[tuple[list[bytes], RequestContext, list[bytes]]] = []
        self._slots = PagedTokenToKVPoolAllocator(
            16 * PAGE, PAGE, torch.float16, "cpu", pool, False
        )
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(4, 64, "cpu", False),
                token_to_kv_pool_allocator=self._slots,
                page_size=PAGE,
                enable_kv_cache_events=True,  # has the tree hash its pages, as a linker does
                tree_components=(ComponentType.FULL,),
            )
        )
        record = KVCache.record

        def note(
            cache: KVCache, keys: list[bytes], context: RequestContext, prompt: list[bytes]
        ) -> None:
            self.told.append((list(keys), context, list(prompt)))
            record(cache, keys, context, prompt)

        patch.setattr(KVCache, "record", note)
        patch.setattr(hooks, "_side", self.rank.side)

    def insert(self, tokens: Sequence[int], **whose: str) -> None:
        """A request has computed these tokens."""
        key = RadixKey(array("q", tokens), **whose)
        self.tree.insert(InsertParams(key=key, value=self._slots.alloc(len(tokens))))
        self.tree.take_events()

    def schedule(self, request: Any) -> None:
        """SGLang looks the request up and computes it next."""
        request.init_next_round_input(self.tree, cow_mamba=False)
        hashes = self.hashes(request)
        self.rank.requests.matched(request, request.prefix_len)
        self.rank.side.lookup(request.rid, hashes[request.prefix_len // PAGE :])
        request.extend_end = len(request.origin_input_ids)
        scheduler = SimpleNamespace(
            tree_cache=self.tree, waiting_queue=[], grammar_manager=Grammars(), device="cuda"
        )
        hooks.schedule(lambda scheduler: (SimpleNamespace(reqs=[request]), None), scheduler)

    def hashes(self, request: Any) -> list[str]:
        """Of the whole pages of its prompt, of which SGLang computes the last token at least."""
        pages = (len(request.origin_input_ids) - 1) // PAGE
        tokens = request.origin_input_ids[: pages * PAGE]
        key = RadixKey(tokens, extra_key=request.extra_key, cache_salt=request.cache_salt)
        found: list[str] = get_storage_hash_str(key, None, page_size=PAGE)
        return found

    def request(self, tokens: Sequence[int], **others: Any) -> Any:
        return Req("r", "", array("q", tokens), SamplingParams(), **others)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    made.rank.close()


@pytest.mark.parametrize("whose", [{}, {"extra_key": "A"}, {"cache_salt": "A"}])
@pytest.mark.parametrize("known", [0, 4, 8, 12, 20])
def test_the_policy_is_told_of_the_whole_prompt(
    world: World, known: int, whose: dict[str, str]
) -> None:
    if known:
        world.insert(PROMPT[:known], **whose)
        world.insert([*PROMPT[: known - 4], 99, 98, 97, 96], **whose)  # splits the tree's node
    request = world.request(PROMPT, **whose)
    world.schedule(request)
    assert request.prefix_len == known
    keys = list(world.rank.side.keys_of(world.hashes(request)))
    tenant = tenant_number(whose.get("cache_salt", ""))
    context = RequestContext(21, known, "r", tenant=tenant, stores=True)
    assert world.told == [(keys[: known // 4], context, keys)]


@pytest.mark.parametrize("whose", [{}, {"extra_key": "A"}, {"cache_salt": "A"}])
@pytest.mark.parametrize("known", [0, 4, 12, 20])
@pytest.mark.parametrize("others", [[], [99, 98, 97, 96]], ids=["node", "part of a node"])
def test_ahead_of_its_turn_a_request_has_the_hashes_of_its_turn(
    world: World, known: int, whose: dict[str, str], others: list[int]
) -> None:
    if known:
        world.insert([*PROMPT[:known], *others], **whose)
    request = world.request(PROMPT, **whose)
    missing = missing_pages(world.tree, request)
    wanted = world.hashes(request)[known // PAGE :]
    assert missing.pages == len(wanted)
    if wanted:
        assert missing.hashes(0, len(wanted), None) == wanted
        first = missing.hashes(0, 1, None)
        assert [*first, *missing.hashes(1, len(wanted), first[0])] == wanted


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("others", [[], [99, 98, 97, 96]], ids=["node", "part of a node"])
def test_sglang_computes_on_from_a_state_only(
    world: World, monkeypatch: pytest.MonkeyPatch, has_state: bool, others: list[int]
) -> None:
    """The tree stays as it is: those of other ranks are not asked."""
    world.insert([*PROMPT[:12], *others])
    nodes = world.tree.tree_core.total_size()
    state = object() if has_state else None
    monkeypatch.setattr(
        world.tree.tree_core, "get_component_device_value", lambda node, component: state
    )
    missing = missing_pages(world.tree, world.request(PROMPT), has_states=True)
    known = 12 if has_state and not others else 0
    assert missing.pages == (len(PROMPT) - 1 - known) // PAGE
    assert missing.hashes(0, 1, None) == world.hashes(world.request(PROMPT))[known // PAGE :][:1]
    assert world.tree.tree_core.total_size() == nodes


def test_a_request_with_embeddings_of_its_own_has_no_pages(world: World) -> None:
    request = world.request(PROMPT)
    request.positional_embed_overrides = object()
    assert missing_pages(world.tree, request).pages == 0


def test_a_request_names_its_session(world: World) -> None:
    world.schedule(world.request(PROMPT, session_id="chat", cache_salt="s"))
    ((_, context, _),) = world.told
    assert context.session == "s\0chat"


@pytest.mark.parametrize("whose", [{}, {"extra_key": "A"}, {"cache_salt": "A"}])
@pytest.mark.parametrize("known", [0, 2, 5, 6])
def test_the_pages_of_an_answer_follow_those_of_the_prompt(
    world: World, known: int, whose: dict[str, str]
) -> None:
    request = world.request(PROMPT, **whose)
    request.output_ids.extend(range(50, 58))
    computed = [*PROMPT, *range(50, 57)]
    world.insert(computed, **whose)
    key = RadixKey(array("q", [*computed, 1]), **whose)
    node = world.tree.tree_core.match_full_device_prefix(key)[1]
    whole = world.tree.tree_core.get_hash_values(node)
    hashes = PageHashes(world.tree)
    assert len(whole) == 7
    before = whole[known - 1] if known else None
    assert hashes.behind(request, known, before) == whole[known:]
