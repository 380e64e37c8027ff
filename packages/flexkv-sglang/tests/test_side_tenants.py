# SPDX-License-Identifier: Apache-2.0
"""Tenants with shares: pages count for the tenant whose requests stored or fetched them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_requests import OwnPages
from sglang_world import Rank, hashes_of, make_windowed, wait_for

from flexkv.types.tenants import NO_TENANT, tenant_number
from flexkv_sglang.copies import Origin
from packages.inside import cache_of

MakeRank = Callable[..., Rank]

A, B = tenant_number("a"), tenant_number("b")
SHARES: dict[str, Any] = {"tenant_shares": {"a": 50, "b": 25}, "eviction_policy": "lru"}


def counts(rank: Rank) -> dict[int, int]:
    """The blocks of each tenant."""
    return {tenant: slots for tenant, slots in slots_of(rank).items() if slots}


def slots_of(rank: Rank) -> dict[int, int]:
    return dict(cache_of(rank.side).slots_of_tenants)


def test_stored_pages_count_for_the_tenant_of_the_salt(make_rank: MakeRank) -> None:
    rank = make_rank(settings=SHARES)
    rank.side.comes_from(Origin(None, A))
    assert rank.store(hashes_of("a", 3), [1, 2, 3])
    hashes = hashes_of("b", 4)
    rank.side.comes_from(Origin(None, B))
    assert rank.store(hashes[:2], [4, 5])
    rank.side.comes_from(Origin(hashes[1], B))
    assert rank.store(hashes[2:], [6, 7])
    assert rank.store(hashes_of("none", 1), [8])  # no earlier tenant is left over
    assert counts(rank) == {NO_TENANT: 1, A: 3, B: 4}


def test_pages_of_windows_count_with_those_of_their_prefix(make_rank: MakeRank) -> None:
    rank = make_rank(pool=make_windowed(), window=8, settings=SHARES)
    rank.side.comes_from(Origin(None, A))
    assert rank.store(hashes_of("a", 3), [1, 2, 3], [4, 5])
    assert counts(rank) == {A: 5}


def test_fetched_pages_count_for_the_tenant_that_waits_for_them(
    make_rank: MakeRank, disk: dict[str, Any]
) -> None:
    hashes = hashes_of("a", 3)
    first = make_rank(pool=make_windowed(), window=8, settings=SHARES | disk)
    first.store(hashes, [1, 2, 3], [4, 5])
    first.close()
    rank = make_rank(pool=make_windowed(), window=8, settings=SHARES | disk)
    rank.look_ahead("r", hashes, salt="b")
    wait_for(rank, "r")
    assert rank.lookup("r", hashes) == [3]
    assert counts(rank) == {B: 5}


def test_a_tenant_below_its_share_keeps_its_pages(make_rank: MakeRank) -> None:
    """Host memory has 32 slots, of which 16 are those of tenant A."""
    small = SHARES | {"cpu_cache_gb": 33 * 4096 / (1 << 30)}
    rank = make_rank(settings=small)
    mine = hashes_of("a", 10)
    rank.side.comes_from(Origin(None, A))
    assert rank.store(mine, range(1, 11))
    for number in range(20):
        rank.side.comes_from(Origin(None, B))
        rank.store(hashes_of(f"other {number}", 4), [1, 2, 3, 4])
    assert rank.lookup("r", mine) == [10]
    assert slots_of(rank)[B] > 10  # what nobody uses is lent


def test_without_shares_nobody_is_counted(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.side.comes_from(Origin(None, A))
    assert rank.store(hashes_of("a", 3), [1, 2, 3])
    assert slots_of(rank) == {}


def test_a_request_has_the_tenant_of_its_salt(make_rank: MakeRank) -> None:
    rank = make_rank(settings=SHARES | {"eviction_policy": "auto"})
    seen: list[int] = []
    cache: Any = cache_of(rank.side)
    record = cache.record
    cache.record = lambda used, context, prompt: (
        seen.append(context.tenant),
        record(used, context, prompt),
    )
    for rid, salt in (("one", "a"), ("two", None)):
        request = SimpleNamespace(
            rid=rid,
            origin_input_ids=list(range(9)),
            output_ids=[],
            session=None,
            session_id=None,
            extra_key=None,
            cache_salt=salt,
            sampling_params=SimpleNamespace(custom_params=None),
            prefix_len=0,
            is_retracted=False,
            finished=lambda: False,
        )
        rank.requests.scheduled([request], [], OwnPages())
    assert seen == [A, NO_TENANT]
