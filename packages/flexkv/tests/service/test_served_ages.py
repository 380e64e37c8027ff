# SPDX-License-Identifier: Apache-2.0
"""A greatest age of blocks that engines share, while the service lives, and after its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from ages_clock import AgesClock

from flexkv.service import attach as attaching
from flexkv.service import attached
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence
from packages.flexkv.tests.service.served import (
    Scheduler,
    Service,
    attached_again,
    keys_of,
    until,
)
from packages.inside import index_of

Attach = Callable[..., Scheduler]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long before another try."""
    monkeypatch.setattr(attaching, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(attached, "_LAST_WRITES_SECONDS", 0.01)


def loadable(one: Scheduler, keys: list[bytes]) -> list[bytes]:
    """Those of these blocks that lookups find, all in agreement with loads."""
    there = one.cache.where(keys)[Medium.HOST]
    found = [key for key, has in zip(keys, there, strict=True) if has]
    count = one.cache.lookup(keys)
    assert keys[:count] == found
    assert [key for key in keys if one.load([key])] == found
    places = one.cache.presence(keys)
    assert [place is Presence.HOST for place in places] == there
    return found


@pytest.mark.parametrize("lives", [True, False])
def test_ages_outlive_the_service(
    make_service: Callable[..., Service],
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    lives: bool,
) -> None:
    """An engine without a service finds no block that is too old, and the next service knows the
    times of all."""
    clock = AgesClock(monkeypatch)
    disk = {"ssd_cache_dir": (str(tmp_path / "disk"),), "ssd_cache_gb": 0.01}
    service = make_service(32, max_age_seconds=100, **disk)
    one = attach(service)
    first, second = keys_of("a", 3), keys_of("b", 2)
    one.store(first)
    clock.pass_by(60)
    one.store(second)
    service.close()
    clock.pass_by(20)
    clock.day -= 100_000  # who sets the clock changes no age
    if lives:
        service.start()
        until(lambda: attached_again(service, one))
        late = attach(service)
        assert loadable(late, first) == first
        assert len(index_of(service.pool.cache)) == 5
    assert loadable(one, first) == first
    assert loadable(one, second) == second
    clock.pass_by(15)
    if lives:
        until(lambda: len(index_of(service.pool.cache)) == 2)
    assert loadable(one, first) == []
    assert loadable(one, second) == second
    assert loadable(one, [*second, *first]) == second
    held = one.cache.load(second)
    assert held is not None
    clock.pass_by(60)
    assert one.cache.load(second) is None
    assert loadable(one, second) == []
    one.copy(held)


def test_a_fetched_block_has_the_time_of_its_store_without_a_service(
    make_service: Callable[..., Service],
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    clock = AgesClock(monkeypatch)
    disk = {"ssd_cache_dir": (str(tmp_path / "disk"),), "ssd_cache_gb": 0.01}
    service = make_service(16, max_age_seconds=600, **disk)
    one = attach(service, step_blocks=4)
    keys = keys_of("a", 3)
    one.store(keys)
    until(lambda: not service.pool.busy)
    clock.pass_by(400)
    fillers = (keys_of(f"filler {number}", 1) for number in count())
    until(lambda: not one.cache.lookup(keys), lambda: one.store(next(fillers)))
    fetch = one.cache.fetch(keys)
    assert fetch is not None
    until(lambda: one.cache.fetch_state(fetch).arrived == 3, one.cache.poll)
    one.cache.end_fetch(fetch)
    one.settle()
    service.close()
    assert loadable(one, keys) == keys
    clock.pass_by(200)
    assert loadable(one, keys) == []


@pytest.mark.parametrize(("before", "after"), [(None, 600), (600, None), (600, 3600)])
def test_the_next_service_may_have_another_greatest_age(
    make_service: Callable[..., Service],
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    before: int | None,
    after: int | None,
) -> None:
    clock = AgesClock(monkeypatch)
    service = make_service(32, max_age_seconds=before)
    one = attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    service.close()
    service.config = replace(service.config, max_age_seconds=after)
    service.start()
    until(lambda: attached_again(service, one))
    if before is None:
        until(lambda: not len(index_of(service.pool.cache)))
        assert loadable(one, keys) == [], "nobody knows how old they are"
        return
    clock.pass_by(600)
    assert loadable(one, keys) == keys
    assert len(index_of(service.pool.cache)) == 3
