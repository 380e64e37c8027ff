# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.engine.scheduler.tables import extend_tables

NOBODY: frozenset[str] = frozenset()


def make_request(name: str, *tables: list[int]) -> TrackedRequest:
    request: Any = SimpleNamespace(request_id=name)
    return TrackedRequest(request, RequestOptions(), engine_blocks=list(tables))


def test_new_blocks_of_cached_groups_follow_the_known_ones() -> None:
    """The engine has three groups, of which the last two are cached, in another order."""
    tracked = make_request("a", [1], [2, 3])
    blocks = [None, ([4, 5], [6], [7, 8])]
    written, complete = extend_tables()({"a": tracked}, ["b", "a"], blocks, NOBODY, (2, 1))
    assert tracked.engine_blocks == [[1, 7, 8], [2, 3, 6]]
    assert (sorted(written), complete) == ([4, 5, 6, 7, 8], True)


def test_requests_that_are_replaced_are_left_out() -> None:
    tracked = make_request("a", [1])
    assert extend_tables()({"a": tracked}, ["a"], [([2],)], {"a"}, (0,)) == ([], True)
    assert tracked.engine_blocks == [[1]]


def test_a_request_whose_blocks_are_unknown_stays_so() -> None:
    tracked = make_request("a")
    assert extend_tables()({"a": tracked}, ["a"], [([2],)], NOBODY, (0,)) == ([2], True)
    assert tracked.engine_blocks == []


def test_blocks_of_requests_that_are_not_tracked_are_written_to() -> None:
    assert extend_tables()({}, ["a"], [([2, 3],)], NOBODY, (0,)) == ([2, 3], True)


def test_an_entry_without_blocks_is_reported() -> None:
    requests = {"a": make_request("a", [1]), "b": make_request("b", [2])}
    blocks = [([],), ([3],)]
    assert extend_tables()(requests, ["a", "b"], blocks, NOBODY, (0,)) == ([3], False)
    assert requests["b"].engine_blocks == [[2, 3]]


def test_a_group_that_the_engine_lacks_is_an_error() -> None:
    with pytest.raises(IndexError):
        extend_tables()({"a": make_request("a", [1])}, ["a"], [([2],)], NOBODY, (1,))
