# SPDX-License-Identifier: Apache-2.0
"""Blocks that leave an index because its caller has chosen them."""

from __future__ import annotations

from flexkv.eviction import LRUPolicy
from flexkv.index.block_index import BlockIndex, block_index


def add(index: BlockIndex, *keys: bytes) -> None:
    """The blocks of a prefix."""
    index.publish(index.reserve_all(keys, range(len(keys)), (0,)))


def test_a_block_of_choice_leaves_or_stays_as_it_was() -> None:
    index = block_index(6, LRUPolicy())
    add(index, b"a", b"b")
    add(index, b"x", b"y")
    assert index.lease_to_leave(b"a") is None, "another builds on it"
    assert index.lease_to_leave(b"z") is None
    first = index.lease_to_leave(b"b")
    assert first is not None
    assert index.lease_to_leave(b"b") is None
    second = index.lease_to_leave(b"a")
    assert second is not None
    index.retire(first)
    index.keep(second)
    assert index.present([b"a", b"b", b"x", b"y"]) == [True, False, True, True]
    left = []
    while (victim := index.lease_victim()) is not None:
        left.append(victim.key)
        index.retire(victim)
    assert left == [b"a", b"y", b"x"]
