# SPDX-License-Identifier: Apache-2.0
"""The verdict says no where it must."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from integration.campaign.clients import Outcome, Request
from integration.campaign.faults import Hit, Kind
from integration.campaign.verdict import Check, OnFailedLoad, check_requests

ONE, BATCH, COMPUTES = OnFailedLoad.FAILS_ONE, OnFailedLoad.FAILS_BATCH, OnFailedLoad.COMPUTES
RIGHT = Request(0, 0.0, 1.0, Outcome.RIGHT)
HIT = Hit(1, Kind.LOAD_FAILED, 5.0, 2)


def broken(checks: Iterable[Check]) -> list[str]:
    return [check.what for check in checks if not check.held]


def requests_broken(
    on_failure: OnFailedLoad, *requests: Request, hits: tuple[Hit, ...] = ()
) -> list[str]:
    return broken(check_requests(on_failure, requests, hits))


@pytest.mark.parametrize("on_failure", OnFailedLoad)
@pytest.mark.parametrize("outcome", [Outcome.WRONG, Outcome.HUNG])
def test_a_wrong_token_and_a_hang_are_never_right(
    on_failure: OnFailedLoad, outcome: Outcome
) -> None:
    assert requests_broken(on_failure, RIGHT) == []
    assert len(requests_broken(on_failure, RIGHT, Request(0, 4.0, 6.0, outcome))) == 1


def test_recompute_allows_no_error() -> None:
    failed = Request(0, 4.0, 6.0, Outcome.FAILED)
    assert requests_broken(COMPUTES, failed, hits=(HIT,)) == ["no request failed"]


def test_fail_allows_an_error_for_each_failed_load() -> None:
    failed = Request(0, 4.0, 6.0, Outcome.FAILED)
    assert requests_broken(ONE, failed, hits=(HIT,)) == []
    only = "a request failed only if its load did"
    assert requests_broken(ONE, failed) == [only]
    assert requests_broken(ONE, failed, failed, hits=(HIT,)) == [only]
    early = Request(0, 1.0, 2.0, Outcome.FAILED)
    assert only in requests_broken(ONE, early, hits=(HIT,))
    store = Hit(1, Kind.STORE_FAILED, 5.0, 2)
    assert requests_broken(ONE, failed, hits=(store,)) == [only]


def test_fail_demands_an_error_for_each_failed_load() -> None:
    answered = Request(0, 4.0, 6.0, Outcome.RIGHT)
    assert requests_broken(ONE, answered, hits=(HIT,)) == [
        "a request whose load failed got no answer"
    ]
    gone = Request(0, 4.0, 6.0, Outcome.ABORTED)
    assert requests_broken(ONE, gone, hits=(HIT,)) == []
    heard_late = Request(0, 3.0, 4.0, Outcome.ABORTED)
    assert requests_broken(ONE, heard_late, hits=(HIT,)) == []
    long_gone = Request(0, -60.0, -50.0, Outcome.ABORTED)
    assert requests_broken(ONE, long_gone, hits=(HIT,)) == [
        "a request whose load failed got no answer"
    ]


def test_one_load_may_end_all_requests_of_its_batch() -> None:
    failed = Request(0, 4.0, 6.0, Outcome.FAILED)
    assert requests_broken(BATCH, failed, failed, hits=(HIT,)) == []
    assert requests_broken(BATCH, failed) == ["a request failed only if its load did"]
    assert requests_broken(BATCH, RIGHT, hits=(HIT,)) == [
        "a request whose load failed got no answer"
    ]


def test_requests_and_loads_are_paired_as_well_as_possible() -> None:
    long = Request(0, 0.0, 9.0, Outcome.FAILED)
    short = Request(1, 4.0, 6.0, Outcome.FAILED)
    late = Hit(2, Kind.LOAD_REFUSED, 8.0, 1)
    assert requests_broken(ONE, long, short, hits=(late, HIT)) == []
