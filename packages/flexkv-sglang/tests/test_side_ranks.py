# SPDX-License-Identifier: Apache-2.0
"""Several ranks: rank 0 decides, and each copies its own heads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sglang_world import (
    PATIENCE_SECONDS,
    Rank,
    hashes_of,
    make_with_states,
    same,
    write_weights,
)

from flexkv import KVCache
from packages.inside_adapters import layers_of, worker_of

Answer = TypeVar("Answer")


class Threads:
    """Ranks that are threads. A rank that makes a call alone waits until the test fails.

    Args:
        rank: number of this one.
        queues: to each rank.
        votes: of each rank, in `all`.
        meeting: of all ranks.
    """

    def __init__(
        self,
        rank: int,
        queues: Sequence[queue.Queue[list[int]]],
        votes: list[bool],
        meeting: threading.Barrier,
    ) -> None:
        self.rank = rank
        self.count = len(queues)
        self.stage, self.stages, self.loads = 0, 1, None
        self._queues = queues
        self._votes = votes
        self._meeting = meeting

    def agree(self, numbers: Sequence[int], count: int) -> list[int]:
        if self.rank == 0:
            assert len(numbers) == count
            for others in self._queues[1:]:
                others.put(list(numbers))
            return list(numbers)
        given = self._queues[self.rank].get(timeout=PATIENCE_SECONDS)
        assert len(given) == count, "ranks are not in step"
        return given

    def all(self, holds: bool) -> bool:
        self._votes[self.rank] = holds
        self._meeting.wait(PATIENCE_SECONDS)
        held = all(self._votes)
        self._meeting.wait(PATIENCE_SECONDS)
        return held

    def first_error(self, text: str | None) -> tuple[int, str] | None:
        assert self.all(text is None), text
        return None


class Engine:
    """Two ranks of one engine; every call is made on both at once."""

    def __init__(self, folder: Path, kind: str, heads: int, *, states: bool = False) -> None:
        write_weights(folder)
        queues: list[queue.Queue[list[int]]] = [queue.Queue() for _ in range(2)]
        votes, meeting = [True, True], threading.Barrier(2)
        self._pool = ThreadPoolExecutor(2)
        made: list[Rank | None] = [None, None]

        def start(rank: int) -> None:
            ranks = Threads(rank, queues, votes, meeting)
            own = heads // 2 or 1
            pool = make_with_states(kind, heads=own) if states else None
            made[rank] = Rank(folder, kind, heads=heads, ranks=ranks, pool_heads=own, pool=pool)

        list(self._pool.map(start, range(2)))
        self.ranks = [each for each in made if each is not None]

    def both(self, call: Callable[[Rank], Answer]) -> list[Answer]:
        return list(self._pool.map(call, self.ranks))

    def close(self) -> None:
        self.both(Rank.close)
        self._pool.shutdown()


@pytest.fixture(params=[("mha", 2), ("mha", 1), ("mla", 1)], ids=["heads", "replicas", "latent"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, *request.param)
    yield made
    made.close()


def test_each_rank_gets_its_own_bytes_back(engine: Engine) -> None:
    hashes = hashes_of("a", 3)
    replicas = engine.ranks[0].pages.sharding.replicas
    stored = engine.both(lambda rank: rank.fill([1, 2, 3], seed=rank.ranks.rank // replicas))
    assert engine.both(lambda rank: rank.store(hashes, [1, 2, 3])) == [True, True]
    answers = engine.both(lambda rank: rank.lookup("r", hashes))
    assert answers == [[3], []]
    assert engine.both(lambda rank: rank.side.agree_on_length(rank.lookup("r", hashes))) == [
        3,
        3,
    ]
    assert engine.both(lambda rank: rank.load("r", hashes, [7, 8, 9])) == [True, True]
    for rank, wanted in zip(engine.ranks, stored, strict=True):
        assert same(rank.read([7, 8, 9]), wanted)


@pytest.mark.parametrize(
    ("kind", "heads"), [("mha", 2), ("mha", 1), ("mla", 1)], ids=["heads", "replicas", "latent"]
)
def test_each_rank_gets_its_own_state_back(tmp_path: Path, kind: str, heads: int) -> None:
    """States differ even where ranks have the same heads."""
    engine = Engine(tmp_path, kind, heads, states=True)
    hashes = hashes_of("a", 2)
    replicas = engine.ranks[0].pages.sharding.replicas
    assert replicas == 2 // heads
    stored = engine.both(lambda rank: rank.fill([1, 2], seed=rank.ranks.rank // replicas))
    states = engine.both(lambda rank: rank.fill_states([3], seed=rank.ranks.rank))
    blocks, last = engine.ranks[0].blocks([1, 2], states=[3]), {"mamba": 1}
    engine.both(lambda rank: rank.side.offload(hashes, lambda: blocks, last=last))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(engine.both(lambda rank: rank.side.ended_offloads())):
        assert time.monotonic() < deadline
    assert engine.both(lambda rank: rank.side.take_offload()) == [True, True]
    engine.both(lambda rank: rank.fill_states(range(5), seed=9))
    assert engine.both(lambda rank: rank.lookup("r", hashes)) == [[2], []]
    loaded = engine.both(lambda rank: rank.load("r", hashes, [7, 8], states=[1]))
    assert loaded == [True, True]
    for rank, pages, state in zip(engine.ranks, stored, states, strict=True):
        assert same(rank.read([7, 8]), pages)
        assert same(rank.read_states([1]), state)
    engine.close()


def test_all_ranks_delay_offloads_once_host_memory_is_full(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.both(lambda rank: rank.store(hashes_of("a", 1), [1]))
    assert [rank.side.delays for rank in engine.ranks] == [False, False]
    status: Any = KVCache.status
    is_full = property(lambda cache: status.fget(cache)._replace(is_full=True))
    monkeypatch.setattr(KVCache, "status", is_full)
    engine.both(lambda rank: rank.store(hashes_of("b", 1), [2]))
    assert [rank.side.delays for rank in engine.ranks] == [True, True]


def test_a_prefix_that_rank_0_does_not_have_is_nobodys(engine: Engine) -> None:
    hashes = hashes_of("a", 3)
    answers = engine.both(lambda rank: rank.lookup("r", hashes))
    assert answers == [[], []]
    assert engine.both(lambda rank: rank.side.agree_on_length([])) == [0, 0]
    assert engine.both(lambda rank: rank.side.load("r", hashes, [7, 8, 9])) == [False, False]
    assert engine.both(lambda rank: rank.side.start_batch()) == [-1, -1]


def test_no_rank_is_told_the_end_before_rank_0_knows_all_ends(engine: Engine) -> None:
    """SGLang takes the least number of all ranks, and then has each forget as many."""
    hashes = hashes_of("a", 3)
    engine.both(lambda rank: rank.side.offload(hashes, lambda: [1, 2, 3]))
    assert engine.ranks[1].side.ended_offloads() == 1
    while not engine.ranks[0].side.ended_offloads():
        engine.ranks[1].side.ended_offloads()
    assert engine.both(lambda rank: rank.side.take_offload()) == [True, True]


def test_ranks_hold_the_same_requests(engine: Engine) -> None:
    """Rank 0 decides, whatever the others know."""
    assert engine.ranks[0].requests.waiting.is_new("a")
    assert engine.ranks[1].side.requests is None
    assert engine.both(lambda rank: rank.side.held(["a", "b"])) == [[False, True]] * 2


def test_ranks_exchange_a_number_for_each_waiting_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rids, sizes, agree = [f"r{number}" for number in range(64)], [], Threads.agree

    def follow(self: Threads, numbers: Sequence[int], count: int) -> list[int]:
        sizes.append(count)
        return agree(self, numbers, count)

    monkeypatch.setattr(Threads, "agree", follow)
    seen = [rid for at, rid in enumerate(rids) if at % 3 and at != 63]
    assert all(engine.ranks[0].requests.waiting.is_new(rid) for rid in seen)
    expected = [rid not in seen for rid in rids]
    assert engine.both(lambda rank: rank.side.held(rids)) == [expected] * 2
    assert sizes == [64, 64]


def test_an_idle_engine_sends_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[int]:
        raise AssertionError("a message for nothing")

    monkeypatch.setattr(Threads, "agree", fail)
    assert engine.both(lambda rank: rank.side.held([])) == [[], []]
    assert engine.both(lambda rank: rank.side.start_batch()) == [-1, -1]
    assert engine.both(lambda rank: rank.side.ended_offloads()) == [0, 0]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_page_numbers_neither_loads_nor_waits_alone(
    engine: Engine, failing: int
) -> None:
    hashes = hashes_of("a", 3)
    engine.both(lambda rank: rank.store(hashes, [1, 2, 3]))
    engine.both(lambda rank: rank.lookup("r", hashes))

    def load(rank: Rank) -> bool:
        pages = None if rank.ranks.rank == failing else [7, 8, 9]
        return rank.side.load("r", hashes, pages)

    assert engine.both(load) == [False, False]
    assert engine.both(lambda rank: rank.side.start_batch()) == [-1, -1]
    assert engine.both(lambda rank: rank.load("r", hashes, [7, 8, 9])) == [True, True]


@pytest.mark.parametrize("failing", [0, 1])
def test_pages_that_one_rank_cannot_name_are_stored_by_none(engine: Engine, failing: int) -> None:
    hashes = hashes_of("a", 3)

    def offload(rank: Rank) -> None:
        pages = None if rank.ranks.rank == failing else [1, 2, 3]
        rank.side.offload(hashes, lambda: pages)

    engine.both(offload)
    while min(engine.both(lambda rank: rank.side.ended_offloads())) == 0:
        pass
    assert not all(engine.both(lambda rank: rank.side.take_offload()))
    assert engine.ranks[0].lookup("r", hashes) == []
    assert all(engine.both(lambda rank: rank.store(hashes, [1, 2, 3])))


def test_a_load_that_fails_on_one_rank_is_a_miss_from_then_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = hashes_of("a", 3)
    engine.both(lambda rank: rank.store(hashes, [1, 2, 3]))
    worker = worker_of(engine.ranks[1].side)

    def refuse(*_: object) -> None:
        raise OSError("no copies today")

    monkeypatch.setattr(layers_of(worker), "start", refuse)
    assert engine.both(lambda rank: rank.load("r", hashes, [7, 8, 9])) == [True, False]
    engine.ranks[0].side.ended_offloads()
    assert engine.ranks[0].lookup("r", hashes) == []
