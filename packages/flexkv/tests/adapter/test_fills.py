# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.adapter.fills import FillCalendar
from flexkv.adapter.request import TrackedRequest
from flexkv.adapter.request_options import RequestOptions

BLOCK = 16


def make_request(name: str) -> TrackedRequest:
    request: Any = SimpleNamespace(request_id=name, num_computed_tokens=0)
    return TrackedRequest(request, RequestOptions(), next_fill=BLOCK)


def test_a_request_is_looked_at_when_its_block_is_full() -> None:
    calendar, tracked = FillCalendar(), make_request("a")
    requests = {"a": tracked}
    calendar.watch(tracked, 3)
    assert [calendar.take_due({"a": 1}, requests) for _ in range(4)] == [[], [], [tracked], []]


def test_one_that_computes_several_tokens_is_looked_at_at_once() -> None:
    calendar, a, b = FillCalendar(), make_request("a"), make_request("b")
    requests = {"a": a, "b": b}
    calendar.watch(a, 16)
    calendar.watch(b, 16)
    assert calendar.take_due({"a": 1, "b": 2}, requests) == [b]


def test_a_request_that_has_ended_is_not_looked_at() -> None:
    calendar = FillCalendar()
    calendar.watch(make_request("a"), 1)
    calendar.watch(make_request("b"), 1)
    assert calendar.take_due({"a": 1, "b": 1}, {"b": make_request("b")}) == []


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_missed_and_few_are_looked_at_for_nothing(seed: int) -> None:
    """Against looking at all requests in every step."""
    rng = random.Random(seed)
    calendar = FillCalendar()
    requests = {name: make_request(name) for name in "abcdef"}
    for tracked in requests.values():
        calendar.watch(tracked, 1)
    idle = 0
    for _ in range(400):
        several = rng.random() < 0.2
        scheduled = {
            name: rng.randint(2, 40) if several and rng.random() < 0.3 else 1
            for name in requests
            if rng.random() < 0.9
        }
        due = calendar.take_due(scheduled, requests)
        assert len({tracked.id for tracked in due}) == len(due)
        for name, tokens in scheduled.items():
            tracked = requests[name]
            tracked.request.num_computed_tokens += tokens
            if tracked.request.num_computed_tokens >= tracked.next_fill:
                assert tracked in due
                tracked.next_fill += BLOCK * (1 + tokens // BLOCK)
            elif tracked in due:
                idle += tokens == 1
        for tracked in due:
            calendar.watch(tracked, tracked.next_fill - tracked.request.num_computed_tokens)
    assert idle < 400
