# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.engine.scheduler.full_blocks import FullBlocks, full_blocks
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import NEVER, TrackedRequest

BLOCK = 16
PLAIN = Groups((Group(0, Reach.ALL, 0, BLOCK, 1),), BLOCK)
MANY = 1000


def make_request(name: str, computed: int = 0) -> TrackedRequest:
    """A request with more blocks and hashes than it needs."""
    request: Any = SimpleNamespace(
        request_id=name, num_computed_tokens=computed, block_hashes=[b""] * MANY
    )
    tables = [list(range(1, MANY))]
    return TrackedRequest(request, RequestOptions(), engine_blocks=tables, next_fill=BLOCK)


def take(
    calendar: FullBlocks, requests: dict[str, TrackedRequest], scheduled: dict[str, int]
) -> dict[str, tuple[int, int]]:
    """What a step fills, by request. Then the tokens of the step count as computed."""
    several = any(tokens > 1 for tokens in scheduled.values())
    found = calendar.take(scheduled, requests, BLOCK, several)
    for name, tokens in scheduled.items():
        if name in requests:
            requests[name].request.num_computed_tokens += tokens  # type: ignore[misc]
    assert len({tracked.id for tracked, _, _ in found}) == len(found)
    assert all(requests[tracked.id] is tracked for tracked, _, _ in found)
    return {tracked.id: (start, stop) for tracked, start, stop in found}


def test_a_request_is_found_when_its_block_is_full() -> None:
    calendar, tracked = full_blocks(PLAIN), make_request("a", BLOCK - 3)
    calendar.watch(tracked, 1)
    found = [take(calendar, {"a": tracked}, {"a": 1}) for _ in range(4)]
    assert found == [{}, {}, {"a": (0, BLOCK)}, {}]
    assert tracked.next_fill == 2 * BLOCK


def test_a_request_that_computes_several_tokens_is_looked_at_at_once() -> None:
    calendar, a, b = full_blocks(PLAIN), make_request("a"), make_request("b")
    calendar.watch(a, 16)
    calendar.watch(b, 16)
    assert take(calendar, {"a": a, "b": b}, {"a": 1, "b": 50}) == {"b": (0, 48)}


def test_a_request_that_has_ended_is_not_found() -> None:
    calendar = full_blocks(PLAIN)
    calendar.watch(make_request("a", BLOCK), 1)
    calendar.watch(make_request("b", BLOCK), 1)
    other = {"b": make_request("b", BLOCK)}
    assert take(calendar, other, {"a": 1, "b": 1}) == {}


def test_a_request_that_is_not_scheduled_is_due_again() -> None:
    calendar, tracked = full_blocks(PLAIN), make_request("a", BLOCK - 1)
    calendar.watch(tracked, 1)
    assert take(calendar, {"a": tracked}, {}) == {}
    assert take(calendar, {"a": tracked}, {"a": 1}) == {"a": (0, BLOCK)}


def test_a_request_of_which_nothing_is_stored_is_never_found() -> None:
    calendar, tracked = full_blocks(PLAIN), make_request("a")
    tracked.next_fill = NEVER
    calendar.watch(tracked, 1)
    assert take(calendar, {"a": tracked}, {"a": 100}) == {}
    assert tracked.next_fill == NEVER


def test_a_block_without_a_hash_or_without_a_place_is_not_full() -> None:
    calendar, tracked = full_blocks(PLAIN), make_request("a")
    tracked.request.block_hashes[3:] = []  # type: ignore[index]
    assert calendar.filled(tracked, 80, BLOCK) == (0, 48)
    assert calendar.filled(tracked, 80, BLOCK) is None
    tracked.request.block_hashes.extend([b""] * 9)  # type: ignore[attr-defined]
    assert calendar.filled(tracked, 63, BLOCK) is None
    tracked.engine_blocks[0][5:] = []
    assert calendar.filled(tracked, 160, BLOCK) == (48, 80)
    tracked.engine_blocks = []
    assert calendar.filled(tracked, 160, BLOCK) is None


def test_blocks_of_several_groups_are_full_with_the_last_one() -> None:
    """The second group has blocks of 32 tokens. States are not looked at."""
    members = (
        Group(0, Reach.ALL, 0, BLOCK, 1),
        Group(1, Reach.WINDOW, 64, 2 * BLOCK, 1),
        Group(2, Reach.STATE, 0, 8 * BLOCK, 1),
    )
    calendar, tracked = full_blocks(Groups(members, BLOCK)), make_request("a")
    tracked.next_fill = 8 * BLOCK
    tracked.engine_blocks = [list(range(99)), list(range(11)), []]
    assert calendar.filled(tracked, 1000, BLOCK) == (0, 2 * 8 * BLOCK)
    assert tracked.next_fill == 3 * 8 * BLOCK


def test_an_error_with_one_request_costs_the_others_this_step_alone() -> None:
    calendar = full_blocks(PLAIN)
    requests = {name: make_request(name, 2 * BLOCK - 2) for name in "abc"}
    for tracked in requests.values():
        tracked.next_fill = 2 * BLOCK
        calendar.watch(tracked, 1)
    del requests["b"].request.block_hashes
    requests["b"].next_fill = BLOCK
    scheduled = dict.fromkeys(requests, 1)
    with pytest.raises(AttributeError):
        take(calendar, requests, scheduled)
    for name in "ac":
        requests[name].request.num_computed_tokens += 1  # type: ignore[misc]
    assert take(calendar, requests, scheduled) == {"a": (BLOCK, 32), "c": (BLOCK, 32)}


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_missed_and_none_is_found_twice(seed: int) -> None:
    """Against looking at all requests in every step."""
    rng = random.Random(seed)
    calendar = full_blocks(PLAIN)
    requests = {name: make_request(name) for name in "abcdef"}
    for tracked in requests.values():
        calendar.watch(tracked, 1)
    full = dict.fromkeys(requests, 0)
    for _ in range(400):
        several = rng.random() < 0.2
        scheduled = {
            name: rng.randint(2, 40) if several and rng.random() < 0.3 else 1
            for name in requests
            if rng.random() < 0.9
        }
        expected = {}
        for name, tokens in scheduled.items():
            computed = requests[name].request.num_computed_tokens + tokens
            stop = computed // BLOCK * BLOCK
            if stop > full[name]:
                expected[name] = full[name], stop
                full[name] = stop
        assert take(calendar, requests, scheduled) == expected
