# SPDX-License-Identifier: Apache-2.0
"""What a fetch says of blocks for which the arena has no room, and how it goes on with them."""

from __future__ import annotations

from collections.abc import Callable

from flexkv.tiers.job import Outcome
from flexkv.types.changes import Medium
from packages.flexkv.tests.transfer import test_fetcher
from packages.flexkv.tests.transfer.test_fetcher import Node, keys

make = test_fetcher.make


def test_a_fetch_without_room_says_what_could_come_and_goes_on_once_there_is_room(
    make: Callable[..., Node],
) -> None:
    node = make("abcdef", slots=4)
    fetch = node.fetch("abcdefg")
    assert (fetch.stop, fetch.reach, fetch.is_short) == (4, 6, True)
    assert fetch.later == ((4, 6, Medium.DISK),)
    assert (fetch.unbounded.stop, fetch.unbounded.missing) == (6, {Medium.DISK: 6})
    node.tiers[0].end_all()
    node.cache.poll()
    other = node.fetch("e")
    assert (other.length, other.stop, other.reach) == (1, 0, 1)
    assert not node.cache.extend_fetch(other, keys("f"))
    assert (other.stop, other.reach) == (0, 2)
    node.cache.end_fetch(fetch)
    assert node.cache.extend_fetch(other, ())
    assert (other.stop, other.is_short) == (2, False)
    node.tiers[0].end_all()
    node.cache.poll()
    node.cache.end_fetch(other)
    assert set(node.ready()) > set("ef")
    node.assert_at_rest()


def test_a_block_that_does_not_come_ends_what_could_follow(make: Callable[..., Node]) -> None:
    node = make("abcdef", slots=4)
    fetch = node.fetch("abcdef")
    node.tiers[0].end(node.tiers[0].of(b"c"), Outcome.FAILED)
    node.cache.poll()
    assert (fetch.stop, fetch.reach, fetch.later) == (2, 2, ())
    assert not node.cache.extend_fetch(fetch, keys("g"))
    node.tiers[0].end_all()
    node.cache.poll()
    node.cache.end_fetch(fetch)
    node.assert_at_rest()
