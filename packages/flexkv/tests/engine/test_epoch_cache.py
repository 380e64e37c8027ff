# SPDX-License-Identifier: Apache-2.0
"""The keys of one engine's epochs in a cache that others share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.client import CacheClient, Hold, Reset, Transfer, TransferEnd
from flexkv.engine.epoch_cache import EpochCache
from flexkv.types.changes import Medium
from flexkv.types.mover import Status
from flexkv.types.presence import Presence
from packages.flexkv.tests.service.served import Scheduler, Service, keys_of, until

KEYS = keys_of("a", 3)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


@pytest.fixture
def engines(service: Service) -> Iterator[tuple[Scheduler, Scheduler]]:
    made = Scheduler(service.root), Scheduler(service.root)
    yield made
    for each in made:
        each.close()


def copy(one: Scheduler, cache: CacheClient, transfer: Transfer | None) -> None:
    """As the rank, until the cache has seen the end."""
    assert transfer is not None
    one.arena.board.report(transfer.cell, 0, Status.DONE)
    one.settle()


def seen(cache: CacheClient, one: Scheduler) -> set[bytes]:
    """What events say that host memory has, of all that came so far."""
    one.settle()
    there: set[bytes] = set()
    for change in cache.drain_changes():
        assert change.medium is Medium.HOST
        there.difference_update(change.removed)
        there.update(change.added)
    return there


def test_the_first_epoch_is_that_of_all_engines(engines: tuple[Scheduler, Scheduler]) -> None:
    one, other = engines
    cache = EpochCache(one.cache, alone=False)
    other.store(KEYS)
    assert cache.lookup(KEYS) == 3
    assert cache.missing(KEYS) == []


@pytest.mark.parametrize("begins", [Reset.CLEAR, Reset.RENEW, None])
def test_a_later_epoch_is_this_engines_alone(
    engines: tuple[Scheduler, Scheduler], begins: Reset | None
) -> None:
    one, other = engines
    cache = EpochCache(one.cache, alone=begins is None)
    other.store(KEYS)
    if begins is not None:
        cache.reset(begins)
    cache.watch()
    one.settle()
    assert cache.lookup(KEYS) == 0
    assert cache.presence(KEYS) == [Presence.ABSENT] * 3
    assert cache.load(KEYS) is None
    assert cache.missing(KEYS) == [0, 1, 2]
    transfer = cache.store(KEYS, range(3))
    assert transfer is not None
    assert transfer.keys == KEYS
    copy(one, cache, transfer)
    until(lambda: cache.lookup(KEYS) == 3, cache.poll)
    loaded = cache.load(KEYS)
    assert loaded is not None
    assert loaded.keys == KEYS
    cache.end_transfer(loaded.id, TransferEnd.CANCEL)
    assert other.cache.lookup(KEYS) == 3, "as before"


def test_events_name_the_blocks_that_this_engine_finds(
    service: Service, engines: tuple[Scheduler, Scheduler]
) -> None:
    one, other = engines
    caches = [EpochCache(each.cache, alone=False) for each in engines]
    for each in caches:
        each.watch()
    caches[0].reset(Reset.CLEAR)
    for each in engines:
        each.settle()
    copy(one, caches[0], caches[0].store(KEYS, range(3)))
    other.store(keys_of("b", 2))
    until(lambda: not service.pool.busy)
    told: list[set[bytes]] = [set(), set()]

    def read() -> None:
        for names, cache, engine in zip(told, caches, engines, strict=True):
            names.update(seen(cache, engine))

    until(lambda: told == [set(KEYS), set(keys_of("b", 2))], read)


def test_pins_and_uses_are_of_the_epoch(
    service: Service, engines: tuple[Scheduler, Scheduler]
) -> None:
    one, _ = engines
    cache = EpochCache(one.cache, alone=True)
    copy(one, cache, cache.store(KEYS, range(3)))
    until(lambda: cache.lookup(KEYS) == 3, cache.poll)
    cache.hold(Hold.PIN, KEYS[:2])
    until(lambda: service.pool.cache.pinned_blocks == 2, cache.poll)
    cache.unhold(Hold.PIN)
    cache.hold(Hold.RETAIN, KEYS, "tenant", 60.0)
    until(lambda: service.pool.cache.pinned_blocks == 3, cache.poll)
    cache.unhold(Hold.RETAIN, "tenant", KEYS[1:])
    until(lambda: service.pool.cache.pinned_blocks == 1, cache.poll)
    cache.record(KEYS, prompt=[*KEYS, b"d"])
    until(lambda: (service.pool.found_blocks, service.pool.prompt_blocks) == (3, 4), cache.poll)
