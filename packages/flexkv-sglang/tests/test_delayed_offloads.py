# SPDX-License-Identifier: Apache-2.0
"""Offloads wait until host memory is full, and then until SGLang is about to evict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sglang_world import Rank, hashes_of

from flexkv.engine.boundary import ErrorBoundary
from flexkv_sglang.delayed_offloads import DelayedOffloads
from flexkv_sglang.ranks import Exchanges, Ranks

_SLOT = 4096
MakeRank = Callable[..., Rank]


def waiting(*tokens: int) -> DelayedOffloads:
    """The nodes 0, 1, ... with these tokens, in order of their use."""
    made = DelayedOffloads(Exchanges(Ranks(), ErrorBoundary()))
    for node, count in enumerate(tokens):
        made.used(node, count)
    return made


def test_those_used_longest_ago_are_taken_first() -> None:
    delayed = waiting(4, 8, 4)
    delayed.used(0, 4)
    assert [*delayed.take(4, 99)] == [1, 2]
    assert delayed.tokens == 4


def test_a_node_that_sglang_has_split_counts_with_what_is_left_of_it() -> None:
    delayed = waiting(8, 4)
    delayed.used(0, 2)
    assert delayed.tokens == 6
    assert [*delayed.take(6, 99)] == []


def test_a_step_takes_no_more_than_it_may() -> None:
    assert [*waiting(4, 4, 4).take(0, 5)] == [0, 1]


def test_before_sglang_sleeps_the_latest_come_first() -> None:
    assert [*waiting(4, 4, 4).take(0, 99, latest=True)] == [2, 1, 0]


def test_nothing_is_taken_after_a_reset() -> None:
    delayed = waiting(4)
    delayed.clear()
    assert [*delayed.take(0, 99)] == []
    assert delayed.tokens == 0


def test_ranks_learn_which_begin_and_whether_more_wait() -> None:
    delayed = waiting(4, 4)
    delayed.wrapper = "SGLang's"
    assert delayed.agree(lambda: [*delayed.take(4, 99)]) == [0]
    assert delayed.wrapper == "SGLang's"
    assert delayed.agree(lambda: [*delayed.take(0, 99)]) == [1]
    assert delayed.agree(list) == []
    assert delayed.wrapper is None


def test_offloads_wait_once_host_memory_is_full(make_rank: MakeRank) -> None:
    rank = make_rank(settings={"cpu_cache_gb": 3 * _SLOT / 2**30})
    rank.store(hashes_of("a", 2), [1, 2])
    assert not rank.side.delays
    rank.store(hashes_of("b", 1), [3])
    assert rank.side.delays


def test_no_offload_waits_above_a_disk(make_rank: MakeRank, tmp_path: Path) -> None:
    disk = {"ssd_cache_dir": [str(tmp_path / "disk")], "ssd_cache_gb": 1 / 64}
    rank = make_rank(settings={"cpu_cache_gb": 3 * _SLOT / 2**30} | disk)
    rank.store(hashes_of("a", 3), [1, 2, 3])
    assert not rank.side.delays
