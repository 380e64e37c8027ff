# SPDX-License-Identifier: Apache-2.0
"""Tenants of a pool: whom blocks and granted slots count for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flexkv.eviction import RequestContext
from flexkv.service import attach as attaching
from flexkv.service import attached
from flexkv.service import messages as wire
from flexkv.types.tenants import NO_TENANT, tenant_number
from packages.flexkv.tests.service.served import (
    Scheduler,
    Service,
    attached_again,
    keys_of,
    until,
)
from packages.inside import index_of, line_of

Attach = Callable[..., Scheduler]
MakeService = Callable[..., Service]

A, B = tenant_number("a"), tenant_number("b")
SHARES = (("a", 50.0), ("b", 25.0))


@pytest.fixture
def service(make_service: MakeService) -> Service:
    return make_service(64, tenant_shares=SHARES)


def blocks_of(service: Service) -> dict[int, int]:
    """The ready blocks of each tenant with a share, and of the others."""
    counts = {NO_TENANT: 0, A: 0, B: 0}
    for block in index_of(service.pool.cache).blocks:
        counts[block.tenant if block.tenant in counts else NO_TENANT] += 1
    return counts


def fill(one: Scheduler, name: str, count: int, tenant: str | None = None) -> None:
    """Store prompts of one block."""
    for number in range(count):
        until(lambda n=number: one.store(keys_of(f"{name} {n}", 1), tenant), one.cache.poll)  # type: ignore[misc]


def test_a_tenant_of_an_engine_keeps_its_share(service: Service, attach: Attach) -> None:
    one, other = attach(service, tenant="a", step_blocks=4), attach(service, step_blocks=4)
    assert not one.cache.info.takes_tenants
    assert other.cache.info.takes_tenants
    until(lambda: service.pool.cache.slots_of_tenants == {NO_TENANT: 0, A: 4, B: 0})
    fill(one, "a", 20)
    fill(other, "x", 80)
    assert blocks_of(service)[A] == 20
    assert one.load(keys_of("a 0", 1))
    fill(one, "more", 60)
    assert blocks_of(service)[NO_TENANT] >= 8


def test_requests_of_one_engine_have_tenants_of_their_own(service: Service, attach: Attach) -> None:
    one = attach(service, step_blocks=4)
    fill(one, "a", 20, "a")
    fill(one, "b", 10, "b")
    fill(one, "other", 100, "c")
    counts = blocks_of(service)
    assert (counts[A], counts[B]) == (20, 10)
    assert all(one.load(keys_of(f"a {number}", 1)) for number in range(20))


def test_a_store_has_blocks_of_several_tenants(service: Service, attach: Attach) -> None:
    one = attach(service)
    keys = [*keys_of("a", 2), *keys_of("b", 3), *keys_of("c", 1)]
    transfer = one.cache.store(keys, range(6), (0, 2, 5), tenants=[A, A, B, B, B, NO_TENANT])
    assert transfer is not None
    one.copy(transfer)
    one.settle()
    assert blocks_of(service) == {NO_TENANT: 1, A: 2, B: 3}


def test_tenants_outlive_the_service(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(attached, "_LAST_WRITES_SECONDS", 0.01)
    one, other = attach(service, tenant="a"), attach(service)
    one.store(keys_of("a", 3))
    other.store(keys_of("b", 2), "b")
    service.close()
    service.config = replace(service.config, tenant_shares=())
    service.start()
    until(lambda: attached_again(service, one, other))
    assert not other.cache.info.takes_tenants
    other.store(keys_of("none", 1))
    service.close()
    service.config = replace(service.config, tenant_shares=(("b", 10.0), ("a", 20.0)))
    service.start()
    until(lambda: attached_again(service, one, other))
    assert other.cache.info.takes_tenants
    assert blocks_of(service) == {NO_TENANT: 1, A: 3, B: 2}
    one.store(keys_of("again", 1))
    assert blocks_of(service) == {NO_TENANT: 1, A: 4, B: 2}
    until(service.accounted)


def test_without_shares_nobody_counts(make_service: MakeService, attach: Attach) -> None:
    service = make_service()
    one = attach(service, tenant="a")
    assert not one.cache.info.takes_tenants
    one.store(keys_of("a", 3))
    assert service.pool.cache.slots_of_tenants == {}


@pytest.mark.parametrize(
    "message",
    [
        wire.Publish(0, [b"a", b"b"], [None, b""], [0, 1], [A], True),
        wire.RecordUse([b"a"], 0, [], RequestContext(tenant=-1)),
        wire.RecordUse([b"a"], 0, [], RequestContext(tenant=1 << 32)),
        wire.Publish(0, [], [], [], [1 << 40], True),
        wire.Fetch(1, [b"a"], False, -1, 0, 0),
        wire.Fetch(1, [b"a"], False, 0, 0, 101),
        wire.Fetch(1, [b"a"], False, 0, 0, -101),
    ],
)
def test_a_number_of_no_tenant_ends_that_engine_alone(
    service: Service, attach: Attach, message: wire.ToService
) -> None:
    good, bad = attach(service), attach(service)
    line_of(bad.cache).put(message)
    bad.cache.poll()
    until(lambda: any(each.has_ended for each in service.server.engines))
    assert good.store(keys_of("b", 3)) == keys_of("b", 3)
    until(service.accounted)
