# SPDX-License-Identifier: Apache-2.0
"""Counters that do not fit what was done, or one another, are seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pytest

from integration.campaign.counts import Counts
from integration.campaign.faults import Hit, Kind
from integration.campaign.sums import Sizes, check_bytes, check_failures, check_queries
from integration.campaign.verdict import Check
from integration.campaign.vllm import check_tokens

SIZES = Sizes(engine_block_bytes=100, block_bytes=200, engine_block_tokens=32)
TWO_RANKS = Sizes(engine_block_bytes=100, block_bytes=200, engine_block_tokens=32, ranks=2)
LONGEST = 100
HIT = Hit(1, Kind.LOAD_FAILED, 5.0, 2)
GOOD = {
    'flexkv_failures_total{cause="load",tier="host"}': 1,
    'flexkv_failures_total{cause="store",tier="host"}': 0,
    'flexkv_failures_total{cause="read",tier="disk"}': 0,
    'flexkv_failures_total{cause="damaged",tier="disk"}': 0,
    'flexkv_failures_total{cause="stalled",tier="disk"}': 0,
    'flexkv_failures_total{cause="write",tier="disk"}': 0,
    'flexkv_failures_total{cause="internal",tier=""}': 0,
    'flexkv_failures_total{cause="read",tier="mooncake"}': 7,
    'flexkv_failures_total{cause="stalled",tier="objects"}': 7,
    'flexkv_resets_total{cause="request"}': 0,
    'flexkv_query_tokens_total{tier="host"}': 640,
    'flexkv_query_tokens_total{tier="disk"}': 512,
    'flexkv_hit_tokens_total{tier="host"}': 128,
    'flexkv_hit_tokens_total{tier="disk"}': 64,
    "num_preemptions_total": 0,
    "external_prefix_cache_queries_total": 640,
    "external_prefix_cache_hits_total": 192,
    'flexkv_stored_blocks_total{tier="host"}': 5,
    'flexkv_stored_blocks_total{tier="disk"}': 3,
    'flexkv_copied_bytes_total{link="device",direction="store"}': 1000,
    'flexkv_copied_bytes_total{link="device",direction="load"}': 400,
    'flexkv_copied_bytes_total{link="disk",direction="write"}': 600,
}


def counts_with(changes: Mapping[str, int]) -> Counts:
    named = dict(GOOD)
    for short, value in changes.items():
        (name,) = [name for name in named if _short(name) == short]
        named[name] = value
    return Counts("".join(f"vllm:{name} {value}\n" for name, value in named.items()), "vllm:")


def _short(name: str) -> str:
    for cut in ("flexkv_", "_total", "external_prefix_cache_"):
        name = name.replace(cut, "")
    labels = [part.split('"')[1] for part in name.split(",") if '"' in part]
    return "_".join((name.partition("{")[0], *labels))


def broken(checks: Iterable[Check]) -> list[str]:
    return [check.what for check in checks if not check.held]


def counters_broken(
    hits: tuple[Hit, ...] = (HIT,),
    sizes: Sizes = SIZES,
    changes: Mapping[str, int] = MappingProxyType({}),
    all_loaded: bool = True,
) -> list[str]:
    counts = counts_with(changes)
    return [
        *broken(check_failures(counts, Counter(), hits, in_parts=False)),
        *broken(check_tokens(counts, LONGEST)),
        *broken(check_queries(counts)),
        *broken(check_bytes(counts, hits, sizes, all_loaded=all_loaded, in_parts=False)),
    ]


def test_counters_that_add_up() -> None:
    assert counters_broken() == []


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("failures_load_host", 0),
        ("failures_store_host", 1),
        ("failures_read_disk", 1),
        ("failures_damaged_disk", 1),
        ("failures_stalled_disk", 1),
        ("failures_write_disk", 1),
        ("failures_internal_", 1),
        ("resets_request", 1),
        ("queries", 641),
        ("hits", 191),
        ("query_tokens_disk", 511),
        ("copied_bytes_device_store", 800),
        ("copied_bytes_disk_write", 601),
        ("copied_bytes_device_load", 300),
    ],
)
def test_counters_that_do_not(change: str, value: int) -> None:
    assert len(counters_broken(changes={change: value})) == 1


def test_vllm_counts_nothing_again_after_a_preemption() -> None:
    changes = {"num_preemptions": 1, "queries": 540, "hits": 92}
    assert counters_broken(changes=changes) == []
    assert len(counters_broken(changes=changes | {"queries": 539})) == 1


def test_ranks_that_copied_beside_one_that_failed() -> None:
    hits = (HIT, Hit(1, Kind.STORE_FAILED, 6.0, 3))
    changes = {"failures_store_host": 1, "copied_bytes_device_store": 1150}
    assert counters_broken(hits=hits, sizes=SIZES, changes=changes) != []
    changes["copied_bytes_device_load"] = 500
    assert counters_broken(hits=hits, sizes=TWO_RANKS, changes=changes) == []


def test_with_recompute_a_load_may_end_before_all_came() -> None:
    less = {"copied_bytes_device_load": 300}
    assert counters_broken(changes=less, all_loaded=False) == []
    assert len(counters_broken(changes={"copied_bytes_device_load": 500}, all_loaded=False)) == 1


@pytest.mark.parametrize(("failures", "right"), [(0, False), (1, True), (2, True), (3, False)])
def test_each_part_of_a_load_may_meet_a_fault(failures: int, right: bool) -> None:
    counts = counts_with({"failures_load_host": failures})
    checks = check_failures(counts, Counter(), (HIT, HIT), in_parts=True)
    assert (broken(checks) == []) == right


@pytest.mark.parametrize(("internal", "right"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_share_that_is_refused_late_is_no_internal_failure(internal: int, right: bool) -> None:
    hits = (HIT, *[Hit(1, Kind.LOAD_REFUSED, 6.0, 1)] * 2)
    counts = counts_with({"failures_internal_": internal})
    checks = check_failures(counts, Counter(), hits, in_parts=True, in_shares=True)
    assert (broken(checks) == []) == right
    whole = check_failures(counts, Counter(), hits, in_parts=True)
    assert (broken(whole) == []) == (internal == len(hits) - 1)


@pytest.mark.parametrize(("loaded", "right"), [(600, True), (601, False)])
def test_no_more_is_loaded_than_was_found(loaded: int, right: bool) -> None:
    counts = counts_with({"copied_bytes_device_load": loaded})
    checks = check_bytes(counts, (HIT,), SIZES, all_loaded=False, in_parts=True)
    assert (broken(checks) == []) == right
