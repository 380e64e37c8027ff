# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from flexkv.client import AwaitedBlocks, FetchState
from flexkv.service import messages as wire
from flexkv.service.page import FETCH_ROW_BYTES, FETCH_ROWS, FetchRows
from flexkv.types.changes import Medium
from packages.flexkv.tests.service.served import Scheduler, Service, keys_of, until
from packages.flexkv.tests.service.test_served_tiers import leave_memory

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
        assert service.write(wire.Fetched(7, state(arrived)))
    assert service.write(wire.Fetched(8, None))
    assert engine.read(7) == wire.Fetched(7, state(2))
    assert engine.read(7) is None
    assert engine.read(8) == wire.Fetched(8, None)
    assert FetchRows(memory).write(wire.Fetched(7, state(3))), "the next service goes on"
    assert engine.read(7) == wire.Fetched(7, state(3))


def test_a_row_has_room_for_three_tiers(memory: memoryview) -> None:
    assert FetchRows(memory).write(wire.Fetched(1 << 40, state(1312, ranges=4)))


def test_a_message_without_room_leaves_none_in_its_row(memory: memoryview) -> None:
    service, engine = FetchRows(memory), FetchRows(memory)
    last = FETCH_ROWS - 1
    service.write(wire.Fetched(last, state(1)))
    assert not service.write(wire.Fetched(last, state(2, ranges=500)))
    found = engine.read(last)
    assert found is None or found.fetch != last


def test_a_message_that_is_being_written_is_not_read(memory: memoryview) -> None:
    """Whichever of its bytes are there already."""
    FetchRows(memory).write(wire.Fetched(1, state(1)))
    before = bytes(memory)
    FetchRows(memory).write(wire.Fetched(1, state(2)))
    after = bytes(memory)
    changed = [i for i in range(MEMORY) if before[i] != after[i]]
    chance = random.Random(1)
    for _ in range(1000):
        engine = FetchRows(memory)
        memory[:] = before
        for i in chance.sample(changed, chance.randrange(1, len(changed))):
            memory[i] = after[i]
        assert engine.read(1) is None
        memory[:] = after
        assert engine.read(1) == wire.Fetched(1, state(2))


def test_bytes_of_no_message_are_not_read(memory: memoryview) -> None:
    chance = random.Random(2)
    for _ in range(1000):
        memory[:] = chance.randbytes(MEMORY)
        assert FetchRows(memory).read(chance.randrange(1 << 32)) is None
        assert FetchRows(memory).write(wire.Fetched(1, None))


def test_more_fetches_than_rows_arrive(with_disk: Service, attach: Attach) -> None:
    """Those without a row by messages."""
    one = attach(with_disk, step_blocks=4)
    keys = keys_of("a", 4)
    leave_memory(with_disk, one, keys)
    fetches = [one.cache.fetch(keys) for _ in range(FETCH_ROWS + 2)]
    for fetch in fetches:
        assert fetch is not None
        until(lambda fetch=fetch: one.cache.fetch_state(fetch).arrived == 4, one.cache.poll)
    for fetch in fetches:
        assert fetch is not None
        one.cache.end_fetch(fetch)
    one.settle()
    leave_memory(with_disk, one, keys_of("later", 1))
