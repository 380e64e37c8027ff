# SPDX-License-Identifier: Apache-2.0
"""Offloads wait until host memory is full, and then until SGLang is about to evict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from sglang_world import Rank, hashes_of

from flexkv_sglang.delayed_offloads import DelayedOffloads

_SLOT = 4096
MakeRank = Callable[..., Rank]


def waiting(**tokens: int) -> tuple[DelayedOffloads, list[str]]:
    """Nodes with these tokens, in order of their use, and where their offloads are noted."""
    made, begun = DelayedOffloads(), list[str]()
    for number, (name, count) in enumerate(tokens.items()):
        made.used(number, count, partial(begun.append, name))
    return made, begun


def test_those_used_longest_ago_are_taken_first() -> None:
    delayed, begun = waiting(a=4, b=8, c=4)
    delayed.used(0, 4, lambda: begun.append("a again"))
    for begin in delayed.take(4):
        begin()
    assert begun == ["b", "c"]
    assert delayed.tokens == 4


def test_a_node_that_sglang_has_split_counts_with_what_is_left_of_it() -> None:
    delayed, begun = waiting(a=8, b=4)
    delayed.used(0, 2, lambda: begun.append("end of a"))
    assert delayed.tokens == 6
    assert [*delayed.take(6)] == []


def test_a_step_takes_no_more_than_it_may() -> None:
    delayed, begun = waiting(a=4, b=4, c=4)
    for begin in delayed.take(0, 5):
        begin()
    assert begun == ["a", "b"]


def test_nothing_is_taken_after_a_reset() -> None:
    delayed, _ = waiting(a=4)
    delayed.clear()
    assert [*delayed.take(0)] == []
    assert delayed.tokens == 0


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
