# SPDX-License-Identifier: Apache-2.0
"""The verdict says no where it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from integration.campaign.clients import Outcome, Request
from integration.campaign.counts import Counts
from integration.campaign.faults import Hit, Kind
from integration.campaign.verdict import Check, Sizes, check_counters, check_requests

SIZES = Sizes(engine_block_bytes=100, block_bytes=200, engine_block_tokens=32, longest_tokens=100)
RIGHT = Request(0, 0.0, 1.0, Outcome.RIGHT)
HIT = Hit(1, Kind.LOAD_FAILED, 5.0, 2)
GOOD = {
    'flexkv_failures_total{cause="load"}': 1,
    'flexkv_failures_total{cause="store"}': 0,
    'flexkv_failures_total{cause="read"}': 0,
    'flexkv_failures_total{cause="damaged"}': 0,
    'flexkv_failures_total{cause="stalled"}': 0,
    'flexkv_failures_total{cause="write"}': 0,
    'flexkv_failures_total{cause="internal"}': 0,
    "flexkv_resets_total": 0,
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


def broken(checks: Iterable[Check]) -> list[str]:
    return [check.what for check in checks if not check.held]


def requests_broken(policy: str, *requests: Request, hits: tuple[Hit, ...] = ()) -> list[str]:
    return broken(check_requests(policy, requests, hits))


def counters_broken(
    policy: str = "fail",
    hits: tuple[Hit, ...] = (HIT,),
    sizes: Sizes = SIZES,
    changes: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    named = dict(GOOD)
    for short, value in changes.items():
        (name,) = [name for name in named if _short(name) == short]
        named[name] = value
    text = "".join(f"vllm:{name} {value}\n" for name, value in named.items())
    return broken(check_counters(Counts(text), Counter(), hits, policy, sizes))


def _short(name: str) -> str:
    for cut in ("flexkv_", "_total", "external_prefix_cache_"):
        name = name.replace(cut, "")
    labels = [part.split('"')[1] for part in name.split(",") if '"' in part]
    return "_".join((name.partition("{")[0], *labels))


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("outcome", [Outcome.WRONG, Outcome.HUNG])
def test_a_wrong_token_and_a_hang_are_never_right(policy: str, outcome: Outcome) -> None:
    assert requests_broken(policy, RIGHT) == []
    assert len(requests_broken(policy, RIGHT, Request(0, 4.0, 6.0, outcome))) == 1


def test_recompute_allows_no_error() -> None:
    failed = Request(0, 4.0, 6.0, Outcome.FAILED)
    assert requests_broken("recompute", failed, hits=(HIT,)) == ["no request failed"]


def test_fail_allows_an_error_for_each_failed_load() -> None:
    failed = Request(0, 4.0, 6.0, Outcome.FAILED)
    assert requests_broken("fail", failed, hits=(HIT,)) == []
    only = "a request failed only if its load did"
    assert requests_broken("fail", failed) == [only]
    assert requests_broken("fail", failed, failed, hits=(HIT,)) == [only]
    early = Request(0, 1.0, 2.0, Outcome.FAILED)
    assert only in requests_broken("fail", early, hits=(HIT,))
    store = Hit(1, Kind.STORE_FAILED, 5.0, 2)
    assert requests_broken("fail", failed, hits=(store,)) == [only]


def test_fail_demands_an_error_for_each_failed_load() -> None:
    answered = Request(0, 4.0, 6.0, Outcome.RIGHT)
    assert requests_broken("fail", answered, hits=(HIT,)) == [
        "a request whose load failed got no answer"
    ]
    gone = Request(0, 4.0, 6.0, Outcome.ABORTED)
    assert requests_broken("fail", gone, hits=(HIT,)) == []
    heard_late = Request(0, 3.0, 4.0, Outcome.ABORTED)
    assert requests_broken("fail", heard_late, hits=(HIT,)) == []
    long_gone = Request(0, -60.0, -50.0, Outcome.ABORTED)
    assert requests_broken("fail", long_gone, hits=(HIT,)) == [
        "a request whose load failed got no answer"
    ]


def test_requests_and_loads_are_paired_as_well_as_possible() -> None:
    long = Request(0, 0.0, 9.0, Outcome.FAILED)
    short = Request(1, 4.0, 6.0, Outcome.FAILED)
    late = Hit(2, Kind.LOAD_REFUSED, 8.0, 1)
    assert requests_broken("fail", long, short, hits=(late, HIT)) == []


def test_counters_that_add_up() -> None:
    assert counters_broken() == []


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("failures_load", 0),
        ("failures_store", 1),
        ("failures_read", 1),
        ("failures_damaged", 1),
        ("failures_stalled", 1),
        ("failures_write", 1),
        ("failures_internal", 1),
        ("resets", 1),
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
    two = replace(SIZES, ranks=2)
    hits = (HIT, Hit(1, Kind.STORE_FAILED, 6.0, 3))
    changes = {"failures_store": 1, "copied_bytes_device_store": 1150}
    assert counters_broken(hits=hits, sizes=SIZES, changes=changes) != []
    changes["copied_bytes_device_load"] = 500
    assert counters_broken(hits=hits, sizes=two, changes=changes) == []


def test_with_recompute_a_load_may_end_before_all_came() -> None:
    assert counters_broken("recompute", changes={"copied_bytes_device_load": 300}) == []
    assert len(counters_broken("recompute", changes={"copied_bytes_device_load": 500})) == 1
