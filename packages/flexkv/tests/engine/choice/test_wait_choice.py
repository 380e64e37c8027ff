# SPDX-License-Identifier: Apache-2.0
"""Waits for several tiers at once; those for one are in `test_chooser`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from fetch_states import FetchStates

from flexkv.client import AwaitedBlocks, FetchId, FetchState
from flexkv.engine.choice.chooser import WaitChooser
from flexkv.engine.choice.cost import PrefillPace, Span
from flexkv.types.changes import Medium

BLOCK_BYTES = 1000
SPAN = Span(0, 1000)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)


@pytest.fixture
def fetches() -> FetchStates:
    return FetchStates()


@pytest.fixture
def chooser(fetches: FetchStates) -> WaitChooser:
    """Of an engine that computes 1,000 tokens in a second."""
    prefill = PrefillPace()
    for _ in range(3):
        prefill.observe([SPAN], 1.0)
    return WaitChooser(prefill, BLOCK_BYTES, fetches.__getitem__)


def state(
    seconds: float, awaited: Mapping[Medium, int], came: Mapping[Medium, int] | None = None
) -> FetchState:
    """One that began so many seconds ago: blocks that came, behind them those that are awaited, by
    tier."""
    came, now = came or {}, time.monotonic()
    arrived = sum(came.values())
    return FetchState(
        now - seconds,
        arrived=arrived,
        stop=arrived + sum(awaited.values()),
        missing=awaited,
        gave={medium: (count, now) for medium, count in came.items()},
        next_medium=next(iter(awaited), None),
    )


def measure(chooser: WaitChooser, medium: Medium, seconds: float) -> None:
    """A tier has given ten blocks in so many seconds."""
    chooser.ended(FetchId(-1), state(seconds, {}, {medium: 10}))


def test_each_tier_has_its_own_pace(chooser: WaitChooser, fetches: FetchStates) -> None:
    measure(chooser, Medium.DISK, 0.1)
    measure(chooser, Medium.OBJECTS, 20.0)
    assert chooser.is_worth_waiting(fetches.begin(state(0.0, {Medium.DISK: 10})), SPAN)
    assert not chooser.is_worth_waiting(fetches.begin(state(0.0, {Medium.OBJECTS: 10})), SPAN)
    assert chooser.is_worth_waiting(fetches.begin(state(0.0, {Medium.MOONCAKE: 10})), SPAN), (
        "nothing is known"
    )


@pytest.mark.parametrize(("reach", "waits"), [(30, True), (60, False)])
def test_blocks_for_which_there_is_no_room_yet_are_weighed(
    chooser: WaitChooser, fetches: FetchStates, reach: int, waits: bool
) -> None:
    measure(chooser, Medium.DISK, 0.2)
    later = (AwaitedBlocks(4, reach, Medium.DISK),)
    short = replace(state(0.0, {Medium.DISK: 4}), reach=reach, later=later)
    assert chooser.is_worth_waiting(fetches.begin(short), SPAN, whole=True) == waits
    assert chooser.is_worth_waiting(fetches.begin(short), SPAN)


@pytest.mark.parametrize(("seconds", "waits"), [(0.9, True), (1.1, False)])
def test_room_is_waited_for_as_long_as_computing_takes(
    chooser: WaitChooser, fetches: FetchStates, seconds: float, waits: bool
) -> None:
    measure(chooser, Medium.DISK, 0.1)
    later = (AwaitedBlocks(0, 1, Medium.DISK),)
    lacking = replace(state(seconds, {}), reach=1, later=later)
    assert chooser.is_worth_waiting(fetches.begin(lacking), SPAN, whole=True) == waits


@pytest.mark.parametrize("slow_last", [True, False])
def test_the_slowest_tier_of_a_fetch_decides(
    chooser: WaitChooser, fetches: FetchStates, slow_last: bool
) -> None:
    measure(chooser, Medium.DISK, 0.1)
    measure(chooser, Medium.OBJECTS, 20.0)
    both = {Medium.DISK: 5, Medium.OBJECTS: 5}
    awaited = both if slow_last else dict(reversed(both.items()))
    assert not chooser.is_worth_waiting(fetches.begin(state(0.0, awaited)), SPAN)


def test_what_has_come_from_one_tier_says_nothing_of_another(
    chooser: WaitChooser, fetches: FetchStates
) -> None:
    measure(chooser, Medium.OBJECTS, 20.0)
    mixed = fetches.begin(state(0.01, {Medium.OBJECTS: 5}, {Medium.DISK: 5}))
    assert not chooser.is_worth_waiting(mixed, SPAN)
    alone = fetches.begin(state(0.01, {Medium.DISK: 5}, {Medium.DISK: 5}))
    assert chooser.is_worth_waiting(alone, SPAN)


def test_a_fetch_teaches_the_pace_of_each_tier_that_gave_blocks(
    chooser: WaitChooser, fetches: FetchStates
) -> None:
    mixed = state(20.0, {}, {Medium.DISK: 5, Medium.OBJECTS: 5})
    early = 5, mixed.begun + 0.05  # long before the last of the others
    chooser.ended(FetchId(-1), replace(mixed, gave={**mixed.gave, Medium.DISK: early}))
    assert chooser.is_worth_waiting(fetches.begin(state(0.0, {Medium.DISK: 10})), SPAN)
    assert not chooser.is_worth_waiting(fetches.begin(state(0.0, {Medium.OBJECTS: 10})), SPAN)


def test_only_the_tier_that_was_silent_is_slower_than_believed(
    chooser: WaitChooser, fetches: FetchStates
) -> None:
    """A disk that gives nothing holds up a prefix that goes on in a store."""
    measure(chooser, Medium.DISK, 0.1)
    measure(chooser, Medium.OBJECTS, 0.5)
    chooser.ended(FetchId(-1), state(5.0, {Medium.DISK: 1, Medium.OBJECTS: 9}))
    assert chooser.is_worth_waiting(fetches.begin(state(0.0, {Medium.OBJECTS: 10})), SPAN)
    assert not chooser.is_worth_waiting(fetches.begin(state(0.0, {Medium.DISK: 10})), SPAN)


@pytest.mark.parametrize(
    ("seconds", "came", "waits"),
    [
        (0.9, 0, True),
        (1.1, 0, False),  # to compute all takes a second
        (1.1, 5, False),  # the rest, 0.5 s: it will take 1.1 s more
        (0.9, 5, True),
        (1.9, 8, False),  # 0.2 s: it will take 0.475 s more
        (1.5, 8, True),
        (0.3, 8, True),
    ],
)
def test_blocks_that_another_engine_computes_are_awaited_as_long_as_it_is_half_as_fast(
    chooser: WaitChooser, fetches: FetchStates, seconds: float, came: int, waits: bool
) -> None:
    begun = time.monotonic() - seconds
    fetches[FetchId(1)] = FetchState(begun, 10, 0, came, 10)
    assert chooser.is_worth_waiting(FetchId(1), SPAN) is waits


@pytest.mark.parametrize(
    "case",
    [
        (0.9, 0, True),
        (1.1, 0, False),  # to compute all takes a second
        (1.1, 5, False),  # the rest, 0.5 s: it will take 1.1 s more
        (0.9, 5, True),
    ],
)
def test_blocks_on_their_way_to_a_store_are_awaited_as_long_as_computing_takes(
    chooser: WaitChooser,
    fetches: FetchStates,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[float, int, bool],
) -> None:
    seconds, arrived, waits = case
    measure(chooser, Medium.OBJECTS, 0.1)
    asked = replace(state(0.0, {Medium.OBJECTS: 10}), queried=Medium.OBJECTS)
    fetch = fetches.begin(asked)
    assert chooser.is_worth_waiting(fetch, SPAN, announced=True)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + seconds)
    if arrived:
        fetches[fetch] = replace(asked, arrived=arrived, missing={Medium.OBJECTS: 10 - arrived})
    assert chooser.is_worth_waiting(fetch, SPAN, announced=True) is waits
    other = fetches.begin(replace(asked, begun=1000.0))
    assert not chooser.is_worth_waiting(other, SPAN), "nobody has announced that it comes"
    chooser.ended(fetch, fetches[fetch])
    assert chooser.is_worth_waiting(fetches.begin(state(0.0, {Medium.OBJECTS: 10})), SPAN), (
        "the store was not slow"
    )
