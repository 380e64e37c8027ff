# SPDX-License-Identifier: Apache-2.0
"""Waits for several tiers at once; those for one are in `test_load_choice`."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
from memory_tier import MemoryTier

from flexkv.engine.choice.cost import PrefillPace, Span
from flexkv.engine.choice.wait_choice import WaitChooser
from flexkv.transfer.fetch import Fetch
from flexkv.transfer.sources import IndexedSource
from flexkv.types.changes import Medium

BLOCK_BYTES = 1000
SPAN = Span(0, 1000)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)


@pytest.fixture
def chooser() -> WaitChooser:
    """Of an engine that computes 1,000 tokens in a second."""
    prefill = PrefillPace()
    for _ in range(3):
        prefill.observe([SPAN], 1.0)
    return WaitChooser(prefill, BLOCK_BYTES)


def fetch(
    seconds: float, awaited: Mapping[Medium, int], came: Mapping[Medium, int] | None = None
) -> Fetch:
    """One that began so many seconds ago: blocks that came, behind them those that are awaited, by
    tier."""
    came = came or {}
    media = [medium for each in (came, awaited) for medium in each for _ in range(each[medium])]
    keys = [bytes([i]) for i in range(len(media))]
    made = Fetch(keys, [])
    made.begun = time.monotonic() - seconds
    made.arrived, made.stop = sum(came.values()), len(keys)
    for key, medium in zip(keys, media, strict=True):
        made.expect([key], IndexedSource(MemoryTier(medium), 0, 1.0))
    for key in keys[: made.arrived]:
        made.settle(key, made.sources[key])
    return made


def measure(chooser: WaitChooser, medium: Medium, seconds: float) -> None:
    """A tier has given ten blocks in so many seconds."""
    chooser.ended(fetch(seconds, {}, {medium: 10}))


def test_each_tier_has_its_own_pace(chooser: WaitChooser) -> None:
    measure(chooser, Medium.DISK, 0.1)
    measure(chooser, Medium.OBJECTS, 20.0)
    assert chooser.is_worth_waiting(fetch(0.0, {Medium.DISK: 10}), SPAN)
    assert not chooser.is_worth_waiting(fetch(0.0, {Medium.OBJECTS: 10}), SPAN)
    assert chooser.is_worth_waiting(fetch(0.0, {Medium.MOONCAKE: 10}), SPAN), "nothing is known"


@pytest.mark.parametrize("slow_last", [True, False])
def test_the_slowest_tier_of_a_fetch_decides(chooser: WaitChooser, slow_last: bool) -> None:
    measure(chooser, Medium.DISK, 0.1)
    measure(chooser, Medium.OBJECTS, 20.0)
    both = {Medium.DISK: 5, Medium.OBJECTS: 5}
    awaited = both if slow_last else dict(reversed(both.items()))
    assert not chooser.is_worth_waiting(fetch(0.0, awaited), SPAN)


def test_what_has_come_from_one_tier_says_nothing_of_another(chooser: WaitChooser) -> None:
    measure(chooser, Medium.OBJECTS, 20.0)
    mixed = fetch(0.01, {Medium.OBJECTS: 5}, {Medium.DISK: 5})
    assert not chooser.is_worth_waiting(mixed, SPAN)
    alone = fetch(0.01, {Medium.DISK: 5}, {Medium.DISK: 5})
    assert chooser.is_worth_waiting(alone, SPAN)


def test_a_fetch_teaches_the_pace_of_each_tier_that_gave_blocks(chooser: WaitChooser) -> None:
    mixed = fetch(20.0, {}, {Medium.DISK: 5, Medium.OBJECTS: 5})
    mixed.gave[Medium.DISK] = 5, mixed.begun + 0.05  # long before the last of the others
    chooser.ended(mixed)
    assert chooser.is_worth_waiting(fetch(0.0, {Medium.DISK: 10}), SPAN)
    assert not chooser.is_worth_waiting(fetch(0.0, {Medium.OBJECTS: 10}), SPAN)


def test_only_the_tier_that_was_silent_is_slower_than_believed(chooser: WaitChooser) -> None:
    """A disk that gives nothing holds up a prefix that goes on in a store."""
    measure(chooser, Medium.DISK, 0.1)
    measure(chooser, Medium.OBJECTS, 0.5)
    silent = fetch(5.0, {Medium.DISK: 1, Medium.OBJECTS: 9})
    chooser.ended(silent)
    assert chooser.is_worth_waiting(fetch(0.0, {Medium.OBJECTS: 10}), SPAN)
    assert not chooser.is_worth_waiting(fetch(0.0, {Medium.DISK: 10}), SPAN)
