# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank alone leaves no other rank waiting, and no wrong bytes.

Two processes joined by gloo play what SGLang does. A rank that leaves out a message makes the other
one wait, or take another message for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from rank_pairs import RANKS, Pair, Pairs
from rank_process import AnyLine, Fault, Round, serve

from packages.line_errors import SHARE, Line

LEADS = [
    Fault("store", "_cache", "store"),
    Fault("store", "_cache", "missing"),
    Fault("store", "_cache", "poll"),
    Fault("store", "tree", "get_last_hash_value"),
    Fault("schedule", "_cache", "lookup"),
    Fault("schedule", "_cache", "fetch"),
    Fault("schedule", "request", "matched"),
    Fault("schedule", "requests.waiting._fetches", "begin"),
    Fault("schedule", "requests.waiting", "held"),
    Fault("schedule", "_chooser", "choose_load"),
    Fault("load", "_cache", "load"),
    Fault("load", "requests", "loads"),
    Fault("load", "requests.waiting._fetches", "media_of"),
]
"""On the rank that decides."""
ANY = [
    Fault("store", "_worker", "start_stores"),
    Fault("store", "_worker", "finished"),
    Fault("schedule", "", "lookup"),
    Fault("schedule", "", "batch_begins"),
    Fault("load", "_worker", "start_loads"),
    Fault("load", "_worker", "wait_for_layer"),
    Fault("load", "_worker", "take_bad_blocks"),
    Fault("load", "_worker", "report"),
]
"""On either rank."""
CASES = [(0, fault) for fault in LEADS] + [(rank, fault) for fault in ANY for rank in range(RANKS)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    made = Pairs(tmp_path_factory.mktemp("pairs"), serve)
    yield made
    made.forget()


@pytest.fixture
def pair(pairs: Pairs, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pairs.pair(request.session) as made:
        yield made


LINES = math.inf if SHARE == 1 else 30
"""The most lines of a rank that fail."""

GOOD = Round(stored=True, found=3, loaded=True, right=True, raised=False, under_way=0, failures=0)


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


@pytest.mark.parametrize("rank", range(RANKS))
def test_an_error_before_any_line_of_one_rank_leaves_no_other_waiting(
    pairs: Pairs, request: pytest.FixtureRequest, rank: int
) -> None:
    """The errors reach each line that a rank executes before, between and after its exchanges."""
    hit: set[Line] = set()
    raised = True
    while raised and len(hit) < LINES:
        with pairs.pair(request.session) as pair:
            rounds = pair.play({rank: AnyLine(frozenset(hit))})
            assert len({(each.stored, each.found, each.loaded) for each in rounds}) == 1
            assert all(each.right for each in rounds if each.loaded)
            assert rounds[0].under_way == 0
            raised = rounds[rank].raised
            hit.update(rounds[rank].hit)
            after = pair.play({})
            if after[0].disabled:
                pairs.forget()  # a rank could not wait for its copies: it has ended them
            else:
                assert after == [GOOD] * RANKS, rounds[rank].hit[-1:]
    assert len(hit) > 20


def test_ranks_leave_without_waiting(pair: Pair, pairs: Pairs) -> None:
    pair.play({})
    pair.close()
    pairs.forget()
