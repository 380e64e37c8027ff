# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from flexkv.client import AwaitedBlocks, FetchId, FetchState
from flexkv.service import page, served_tiers
from flexkv.service.page import FETCH_ROW_BYTES, FETCH_ROWS, MOST_RANGES, FetchRow, FetchRows
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence
from packages.flexkv.tests.service.served import Scheduler, Service, keys_of, until

Attach = Callable[..., Scheduler]
MEMORY = FETCH_ROWS * FETCH_ROW_BYTES


def state(arrived: int, ranges: int = 1) -> FetchState:
    awaited = [AwaitedBlocks(2 * i, 2 * i + 1, Medium.DISK) for i in range(ranges)]
    gave = {Medium.DISK: (arrived, 2.5), Medium.OBJECTS: (1, 2.5), Medium.MOONCAKE: (1, 1.5)}
    missing = dict.fromkeys(gave, 1)
    return FetchState(1.5, 1312, 0, arrived, 1312, Medium.OBJECTS, missing, gave, None, awaited)


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(MEMORY))


def test_the_reader_gets_the_latest_message_once(memory: memoryview) -> None:
    service, engine = FetchRows(memory), FetchRows(memory)
    assert engine.read(7) is None
    for arrived in range(3):
        service.write(FetchRow(7, 1, state(arrived)))
    service.write(FetchRow(8, 1, None))
    assert engine.read(7) == FetchRow(7, 1, state(2))
    assert engine.read(7) is None
    assert engine.read(8) == FetchRow(8, 1, None)
    FetchRows(memory).write(FetchRow(7, 2, state(3)))  # the next service goes on
    assert engine.read(7) == FetchRow(7, 2, state(3))


def test_a_row_has_room_for_the_ranges_of_three_tiers(memory: memoryview) -> None:
    last = FETCH_ROWS - 1
    whole = state(1312, ranges=500)
    FetchRows(memory).write(FetchRow((1 << 40) + last, 1 << 40, whole))
    found = FetchRows(memory).read(last)
    assert found is not None
    assert found.state == replace(whole, awaited=list(whole.awaited[:MOST_RANGES]))


def test_a_message_that_is_being_written_is_not_read(memory: memoryview) -> None:
    """Whichever of its bytes are there already."""
    FetchRows(memory).write(FetchRow(1, 1, state(1)))
    row = memory[FETCH_ROW_BYTES : 2 * FETCH_ROW_BYTES]
    before = bytes(row)
    FetchRows(memory).write(FetchRow(1, 1, state(2)))
    after = bytes(row)
    changed = [i for i in range(FETCH_ROW_BYTES) if before[i] != after[i]]
    chance = random.Random(1)
    for _ in range(1000):
        engine = FetchRows(memory)
        row[:] = before
        for i in chance.sample(changed, chance.randrange(1, len(changed))):
            row[i] = after[i]
        assert engine.read(1) is None
        row[:] = after
        assert engine.read(1) == FetchRow(1, 1, state(2))


def test_bytes_of_no_message_are_not_read(memory: memoryview) -> None:
    chance = random.Random(2)
    for _ in range(1000):
        memory[:FETCH_ROW_BYTES] = chance.randbytes(FETCH_ROW_BYTES)
        assert FetchRows(memory).read(FETCH_ROWS * chance.randrange(1 << 32)) is None
        FetchRows(memory).write(FetchRow(0, 1, None))


def test_each_fetch_has_a_row_of_its_own(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside those that last, and no more begin than there are rows."""
    monkeypatch.setattr(page, "FETCH_ROWS", 4)
    monkeypatch.setattr(served_tiers, "FETCH_ROWS", 4)
    one, other = attach(service), attach(service)
    keys = keys_of("a", 2)
    transfer = one.cache.store(keys, range(2))
    assert transfer is not None
    until(lambda: other.cache.presence(keys)[-1] is Presence.BELOW)
    begun: list[FetchId] = []
    for _ in range(9):
        while (fetch := other.cache.fetch(keys)) is not None:
            begun.append(fetch)
        assert len(begun) == 4
        other.cache.poll()
        other.cache.end_fetch(begun.pop(1))
    one.copy(transfer)
    one.settle()
    for fetch in begun:
        until(lambda fetch=fetch: other.cache.fetch_state(fetch).done, other.cache.poll)  # type: ignore[misc]
        assert other.cache.lookup(keys) == 2
        other.cache.end_fetch(fetch)
    other.settle()
    until(service.accounted)
