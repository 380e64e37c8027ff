# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank alone leaves no other rank waiting, and no wrong bytes.

Two processes joined by gloo play what SGLang does. A rank that leaves out a message makes the other
one wait, or take another message for it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_process import GLOO_SECONDS, RANKS, Fault, Round, serve
from sglang_world import write_weights

PATIENCE_SECONDS = 3 * GLOO_SECONDS

LEADS = [
    Fault("store", "_cache", "store"),
    Fault("store", "_cache", "missing"),
    Fault("store", "_cache", "poll"),
    Fault("store", "tree", "get_prefix_hash_values"),
    Fault("schedule", "_cache", "lookup"),
    Fault("schedule", "_cache", "fetch"),
    Fault("schedule", "_awaited", "begin"),
    Fault("schedule", "_awaited", "held"),
    Fault("schedule", "_chooser", "choose_load"),
    Fault("load", "_cache", "load"),
    Fault("load", "_queries", "loaded"),
    Fault("load", "_awaited", "end"),
]
"""On the rank that decides."""
ANY = [
    Fault("store", "_worker", "start_stores"),
    Fault("store", "_worker", "finished"),
    Fault("schedule", "", "batch_begins"),
    Fault("schedule", "request", "matched"),
    Fault("load", "_worker", "start_loads"),
    Fault("load", "_worker", "report"),
]
"""On either rank."""
CASES = [(0, fault) for fault in LEADS] + [(rank, fault) for fault in ANY for rank in range(RANKS)]


class Pair:
    """Two ranks."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        write_weights(folder)
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe() for _ in range(RANKS)]
        self._pipes = [ours for ours, _ in pipes]
        self._children = [
            fork.Process(target=serve, args=(rank, folder, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for child in self._children:
            child.start()
        for _, theirs in pipes:
            theirs.close()

    def play(self, faults: dict[int, Fault]) -> list[Round]:
        for rank, pipe in enumerate(self._pipes):
            pipe.send(faults.get(rank))
        return [self._answer(rank) for rank in range(RANKS)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("close")
        assert [self._answer(rank) for rank in range(RANKS)] == ["closed"] * RANKS

    def kill(self) -> None:
        for child in self._children:
            child.kill()
            child.join()

    def _answer(self, rank: int) -> Round:
        pipe = self._pipes[rank]
        assert pipe.poll(PATIENCE_SECONDS), f"rank {rank} waits"
        answer: Round = pipe.recv()
        return answer


class Pairs:
    """One pair after the other, each until it has failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._pair: Pair | None = None

    def pair(self) -> Pair:
        if self._pair is None:
            self._made += 1
            self._pair = Pair(self._folder / str(self._made))
        return self._pair

    def forget(self) -> None:
        if self._pair is not None:
            self._pair.kill()
            self._pair = None


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    made = Pairs(tmp_path_factory.mktemp("pairs"))
    yield made
    made.forget()


@pytest.fixture
def pair(pairs: Pairs, request: pytest.FixtureRequest) -> Iterator[Pair]:
    failed = request.session.testsfailed
    yield pairs.pair()
    if request.session.testsfailed > failed:
        pairs.forget()


GOOD = Round(stored=True, found=3, loaded=True, right=True, raised=False, under_way=0)


def name_of(case: tuple[int, Fault]) -> str:
    rank, fault = case
    return f"{fault.owner}.{fault.call} on rank {rank}".removeprefix(".")


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_no_rank_waits_for_one_on_which_something_went_wrong(
    pair: Pair, case: tuple[int, Fault]
) -> None:
    rank, fault = case
    rounds = pair.play({rank: fault})
    assert rounds[rank].raised, "the fault did not happen"
    assert len({(each.stored, each.found, each.loaded) for each in rounds}) == 1
    assert all(each.right for each in rounds if each.loaded)
    assert rounds[0].under_way == 0
    assert pair.play({}) == [GOOD] * RANKS


def test_ranks_leave_without_waiting(pair: Pair, pairs: Pairs) -> None:
    pair.play({})
    pair.close()
    pairs.forget()
