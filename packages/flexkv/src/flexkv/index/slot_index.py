# SPDX-License-Identifier: Apache-2.0
"""The index of a directory on disk: which key's block lies in which slot, and which leaves next.

It is made for millions of slots: with keys of 32 bytes it takes about 115 bytes for each, and about
95 more with `hazard`; `bench/disk_index.py` measures that. Its code is among the kernels, because
an engine's step waits for it; `flexkv_kernels/block_index.pyi` describes its calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from flexkv.eviction import LRUPolicy, OnePolicy
from flexkv.system.native import kernels
from flexkv.types.changes import take_oldest

if TYPE_CHECKING:
    from flexkv_kernels.block_index import SlotIndex
else:
    SlotIndex = object  # the core runs without the kernels, and annotations alone name it

__all__ = ["SlotIndex", "drain_changes", "restore", "slot_index"]

_AT_ONCE = 4096
"""Records that an index gets at once. Not tuned."""


def slot_index(num_slots: int, policy: OnePolicy | None = None) -> SlotIndex:
    """An index of `num_slots` slots, whose victims `policy` chooses; None for LRU until `follow`.
    Raises ConfigError if the kernels are not installed."""
    index: SlotIndex = kernels("block_index").NativeSlotIndex(num_slots)
    if policy is not None and not isinstance(policy, LRUPolicy):
        index.follow(policy)
    return index


def restore(
    index: SlotIndex, records: Iterable[tuple[int, bytes, bytes, int, int]]
) -> tuple[int, int, list[int]]:
    """Fill an empty index, which no other thread has yet, with the records of a table: slot, key,
    checksum, generation and time of each.

    If several records have one key, the latest counts. A block of an earlier generation counts as
    used longer ago. Returns the greatest generation and time, 0 if there is none, and the slots of
    the records that do not count.
    """
    generation = latest = 0
    outdated: list[int] = []
    left = iter(records)
    # Native code does not call Python here: a process that ends meanwhile would abort.
    while part := list(islice(left, _AT_ONCE)):
        last, time, lost = index.enter(part)
        generation, latest = max(generation, last), max(latest, time)
        outdated += lost
    index.begin()
    return generation, latest, outdated


def drain_changes(index: SlotIndex, limit: int, stop: int | None = None) -> dict[bytes, bool]:
    """Up to `limit` blocks that became ready or left since the last call, the oldest change first;
    for the key of each whether it became ready. Blocks that were there before `watch` only come
    from slots before `stop`. Empty without `watch`."""
    changes = index.note_changes(limit, index.num_slots if stop is None else stop)
    return {} if changes is None else take_oldest(changes, limit)
