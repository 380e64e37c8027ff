# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states: a hit ends where a state was stored, or it is none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_world import (
    LAYERS,
    STATES,
    Rank,
    hashes_of,
    make_with_states,
    same,
    wait_for,
)

from flexkv import LayoutError
from flexkv_sglang.pages import describe_pages
from flexkv_sglang.states import describe_states

MakeRank = Callable[..., Rank]


@pytest.fixture
def make_stateful_rank(make_rank: MakeRank) -> MakeRank:
    def make(
        kind: str = "mha", page_size: int = 4, layers: int = 2 * LAYERS, **options: Any
    ) -> Rank:
        pool = make_with_states(kind, page_size=page_size, layers=layers)
        return make_rank(kind, pool=pool, **options)

    return make


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("layers", [1, LAYERS, 4 * LAYERS])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_state_comes_back_into_another(
    make_stateful_rank: MakeRank, kind: str, page_size: int, layers: int
) -> None:
    rank = make_stateful_rank(kind, page_size, layers)
    hashes = hashes_of("a", 3)
    stored = rank.fill([5, 2, 7], seed=1)
    state = rank.fill_states([3], seed=2)
    assert rank.store(hashes, [5, 2, 7], states=[3])
    rank.fill(range(13), seed=3)
    rank.fill_states(range(STATES), seed=4)
    others = [page for page in range(13) if page not in (9, 1, 4)]
    untouched = rank.read(others), rank.read_states([0, 2, 3, 4])
    assert rank.lookup("r", hashes) == [3]
    assert rank.load("r", hashes, [9, 1, 4], states=[1])
    assert same(rank.read([9, 1, 4]), stored)
    assert same(rank.read_states([1]), state)
    assert same(rank.read(others), untouched[0])
    assert same(rank.read_states([0, 2, 3, 4]), untouched[1])


def test_a_part_of_a_state_is_not_larger_than_a_page(make_stateful_rank: MakeRank) -> None:
    rank = make_stateful_rank(page_size=4)
    page = rank.pages.layout.block_bytes
    temporal, conv = rank.pages.states
    assert temporal.parts > conv.parts > 1
    for cut in (temporal, conv):
        assert cut.layout.block_bytes <= page < cut.layout.block_bytes * cut.parts
        # No more parts than needed, cut at multiples of 256 bytes.
        assert cut.layout.block_bytes * 2 >= page


def test_a_layer_waits_for_its_own_state(make_stateful_rank: MakeRank) -> None:
    """State and full attention alternate: layer 0 has a state, layer 1 has none."""
    rank = make_stateful_rank(layers=LAYERS)
    hashes = hashes_of("a", 2)
    full = rank.fill([5, 2], seed=1)
    state = rank.fill_states([3], seed=2)
    assert rank.store(hashes, [5, 2], states=[3])
    rank.fill([9, 1], seed=3)
    rank.fill_states([1], seed=4)
    assert rank.side.load("r", hashes, rank.blocks([9, 1], states=[1]), rank.last(states=[1]))
    rank.side.start_batch()
    for layer in range(2 * LAYERS):
        rank.side.wait_for_layer(layer)
        number = layer // 2
        if layer % 2:
            here = slice(2 * number, 2 * number + 2)  # its keys and values
            assert same(rank.read([9, 1])[here], full[here])
        else:
            found, wanted = rank.read_states([1]), state
            assert same([each[number] for each in found], [each[number] for each in wanted])
    assert rank.side.finish_batch()


def test_a_hit_ends_where_a_state_ends(make_stateful_rank: MakeRank) -> None:
    rank = make_stateful_rank()
    hashes = hashes_of("a", 6)
    # As SGLang stores a prompt in two chunks, then an answer without a state.
    assert rank.store(hashes[:2], [1, 2], states=[1])
    assert rank.store(hashes[2:4], [3, 4], states=[2])
    assert rank.store(hashes[4:], [5, 6])
    assert rank.lookup("r", hashes) == [4]
    assert rank.lookup("r", hashes[:3]) == [2]
    assert rank.lookup("r", hashes[:1]) == []
    # SGLang has the first pages itself, and a state.
    assert rank.lookup("r", hashes[1:]) == [3]
    assert rank.lookup("r", hashes[4:]) == []


def test_a_state_that_a_stored_prefix_gets_later_is_stored(make_stateful_rank: MakeRank) -> None:
    rank = make_stateful_rank()
    hashes = hashes_of("a", 4)
    assert rank.store(hashes, [1, 2, 3, 4], states=[1])
    assert rank.lookup("r", hashes[:2]) == []
    stored = rank.fill_states([2], seed=1)
    assert rank.store(hashes[:2], [1, 2], states=[2])
    assert rank.lookup("r", hashes[:2]) == [2]
    assert rank.load("r", hashes[:2], [5, 6], states=[3])
    assert same(rank.read_states([3]), stored)


def test_a_load_without_its_state_is_refused(make_stateful_rank: MakeRank) -> None:
    rank = make_stateful_rank()
    hashes = hashes_of("a", 3)
    assert rank.store(hashes, [1, 2, 3], states=[1])
    assert not rank.side.load("r", hashes, [4, 5, 6])
    blocks = rank.blocks([4, 5, 6], states=[2])
    assert not rank.side.load("r", hashes, blocks[:-1], {"mamba": 1})
    assert not rank.side.load("r", hashes[:2], rank.blocks([4, 5], states=[2]), {"mamba": 1})
    assert rank.load("r", hashes, [4, 5, 6], states=[2])


def test_a_state_without_one_part_is_none(make_stateful_rank: MakeRank) -> None:
    rank = make_stateful_rank(settings={"eviction_policy": "lru"})
    hashes = hashes_of("a", 4)
    assert rank.store(hashes[:2], [1, 2], states=[1])
    assert rank.store(hashes[2:], [3, 4], states=[2])
    assert rank.lookup("r", hashes) == [4]
    others = 0
    while rank.lookup("r", hashes) == [4]:
        assert others < 10_000
        assert rank.store(hashes_of(f"other {others}", 1), [7])
        others += 1
    assert rank.lookup("r", hashes) in ([], [2])


def test_requests_with_one_prefix_do_not_wait_for_each_other(make_stateful_rank: MakeRank) -> None:
    """A request computes on the state that it has loaded: no other one finds it in SGLang's own
    cache."""
    rank = make_stateful_rank()
    hashes = hashes_of("a", 2)
    assert rank.store(hashes, [1, 2], states=[1])
    for rid in ("one", "two"):
        rank.look_ahead(rid, hashes)
    assert rank.side.held(["one", "two"]) == [False, False]


def test_a_state_comes_from_the_disk(make_stateful_rank: MakeRank, disk: dict[str, Any]) -> None:
    first = make_stateful_rank(settings=disk)
    hashes = hashes_of("a", 5)
    stored = first.fill([1, 2, 3, 4], seed=1)
    state = first.fill_states([3], seed=2)
    assert first.store(hashes[:4], [1, 2, 3, 4], states=[3])
    assert first.store(hashes[4:], [5])
    first.close()

    second = make_stateful_rank(settings=disk)
    assert second.lookup("r", hashes) == []
    second.look_ahead("r", hashes)
    assert second.side.held(["r"]) == [True]
    wait_for(second, "r")
    assert second.lookup("r", hashes) == [4]
    assert second.load("r", hashes[:4], [7, 8, 9, 10], states=[2])
    assert same(second.read([7, 8, 9, 10]), stored)
    assert same(second.read_states([2]), state)


def test_other_states_have_another_fingerprint(
    make_stateful_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flexkv.sglang"):
        make_stateful_rank()
        make_stateful_rank(layers=LAYERS)
    started = [line for line in caplog.messages if "fingerprint" in line]
    assert len({line.rpartition(" ")[2] for line in started}) == len(started) == 2


def test_the_order_of_a_state_in_memory_counts() -> None:
    pool = make_with_states()
    before = describe_pages(pool, 4, heads=2, ranks=1, states=pool.states).traits
    (conv,) = pool.info.conv
    pool.info.conv = (conv.contiguous(),)
    after = describe_pages(pool, 4, heads=2, ranks=1, states=pool.states).traits
    assert before != after


@pytest.mark.parametrize(("heads", "replicas"), [(8, 1), (2, 2), (1, 4)])
def test_ranks_with_the_same_heads_have_states_of_their_own(heads: int, replicas: int) -> None:
    pool = make_with_states("mha" if heads > 1 else "mla", page_size=16)
    pages = describe_pages(pool, 16, heads=heads, ranks=4, states=pool.states)
    assert (pages.sharding.ranks, pages.sharding.replicas, pages.sharding.heads) == (
        4,
        replicas,
        None,
    )
    assert all(each.is_own for each in pages.apart)
    for cut in pages.states:
        # Ranks that share a part of a slot share its room, too.
        assert cut.layout.block_bytes * replicas <= pages.layout.block_bytes


def test_states_with_gaps_are_refused() -> None:
    pool = make_with_states()
    wide = torch.zeros(3, STATES, 8, 8)
    pool.info.temporal = wide[:, :, :, :4]
    with pytest.raises(LayoutError, match=r"'temporal' have .*; allowed: states without gaps"):
        describe_states(pool.states, 0, 4096)


def test_pools_of_other_classes_are_refused() -> None:
    pool = make_with_states()
    with pytest.raises(LayoutError, match="recurrent states in its own way; allowed: MambaPool"):
        describe_states(SimpleNamespace(), 0, 4096)
    with pytest.raises(LayoutError, match="HybridLinearKVPool of a model without recurrent states"):
        describe_pages(pool, 4, heads=2, ranks=1)
    with pytest.raises(LayoutError, match="SimpleNamespace of a model with recurrent states"):
        describe_pages(pool.full_kv_pool, 4, heads=2, ranks=1, states=pool.states)
    pool.info.extra_checkpoint_buffers = (object(),)
    with pytest.raises(LayoutError, match="side states beside its states; allowed: none"):
        describe_states(pool.states, 0, 4096)
