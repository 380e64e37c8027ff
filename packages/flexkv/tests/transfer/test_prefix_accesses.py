# SPDX-License-Identifier: Apache-2.0
"""Uses are noted at once and counted in parts, last block of a prefix first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from disk_blocks import FINGERPRINT, SLOT, capacity_of
from memory_tier import MemoryTier

from flexkv.eviction import UNKNOWN_REQUEST, LRUPolicy
from flexkv.index.block_index import BlockIndex, block_index
from flexkv.tiers.disk import DiskTier, open_disk_tier
from flexkv.transfer.demote import Demoter, EvictionWriteback
from flexkv.transfer.sources import Source
from flexkv.transfer.stack import _COUNTED_BLOCKS, PrefixAccesses
from flexkv.types.backlog import BACKLOG_SHARE


def names(count: int, prefix: str = "a") -> list[bytes]:
    return [f"{prefix}{i:06d}".encode() for i in range(count)]


def filled(keys: Sequence[bytes]) -> BlockIndex:
    """An arena whose blocks were used in the order of `keys`."""
    index = block_index(len(keys), LRUPolicy())
    for key in keys:
        block = index.reserve(key, None)
        assert block is not None
        index.publish([block])
    return index


def order(index: BlockIndex) -> list[bytes]:
    """What leaves, in that order."""
    return [block.key for block in sorted(index.blocks, key=lambda block: block.used)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = open_disk_tier([str(tmp_path)], FINGERPRINT, SLOT, capacity_of(4))
    yield tier
    assert tier.close()


def test_a_poll_counts_a_part_and_the_order_is_as_if_at_once() -> None:
    keys = names(3 * _COUNTED_BLOCKS)
    index = filled(keys)
    log = PrefixAccesses(index, (), ())
    log.note(keys[:-1], UNKNOWN_REQUEST)
    log.note(keys[:2], UNKNOWN_REQUEST)
    log.count()
    assert order(index)[-_COUNTED_BLOCKS:] == keys[-2 : -2 - _COUNTED_BLOCKS : -1]
    while log.waiting:
        log.count()
    assert order(index) == [keys[-1], *reversed(keys[2:-1]), keys[1], keys[0]]


def test_a_prefix_is_what_it_was_when_it_was_noted() -> None:
    keys = names(3)
    index = filled(keys)
    log = PrefixAccesses(index, (), ())
    noted = keys[:1]
    log.note(noted, None)
    noted[:] = keys[1:]
    log.count()
    assert order(index) == [keys[1], keys[2], keys[0]]


def test_more_of_a_long_backlog_is_counted() -> None:
    keys = names(4 * _COUNTED_BLOCKS)
    index = filled(keys)
    log = PrefixAccesses(index, (), ())
    for _ in range(BACKLOG_SHARE):
        log.note(keys, None)
    log.count()
    counted = len(keys)
    assert order(index)[-counted:] == keys[: -counted - 1 : -1]


def test_a_cleared_log_counts_nothing() -> None:
    keys = names(3)
    index = filled(keys)
    log = PrefixAccesses(index, (), ())
    log.note(keys, None)
    log.clear()
    assert not log.waiting
    log.count()
    assert order(index) == keys


def test_a_prefix_is_offered_whole_to_each_tier_that_lacks_what_the_arena_has() -> None:
    keys = names(2 * _COUNTED_BLOCKS)
    index = filled(keys)
    full, empty = MemoryTier(), MemoryTier()
    full.blocks.update(dict.fromkeys(keys, b""))
    memory = memoryview(bytearray(len(keys)))
    demoters = [
        Demoter(
            index,
            lambda slot: memory[slot : slot + 1],
            Source(tier, place, 1.0),
            EvictionWriteback(index),
        )
        for place, tier in enumerate((full, empty))
    ]
    log = PrefixAccesses(index, (), demoters)
    log.note(keys, None)
    log.note(names(9, "other"), UNKNOWN_REQUEST)
    while log.waiting:
        log.count()
    assert empty.tasks == []
    log.note(keys, UNKNOWN_REQUEST)
    log.count()
    assert empty.tasks == []
    while log.waiting:
        log.count()
    for demoter in demoters:
        demoter.write_waiting(all_blocks=True)
    assert [task.key for task in empty.tasks] == keys
    assert full.tasks == []
