# SPDX-License-Identifier: Apache-2.0
"""A model of a disk tier for replays: it keeps and evicts blocks, but no bytes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from flexkv.tiers.base import BlockResult, TierFigures, Traffic
from flexkv.tiers.disk.slot_index import SlotIndex
from flexkv.tiers.disk.table import CHECKSUM_BYTES
from flexkv.tiers.job import Outcome, Priority
from flexkv.types.changes import Medium

_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


class ModelTier:
    """An `IndexedTier` with the index of a disk tier; each read and write ends at once. Buffers are
    neither read nor written.

    Args:
        slots: the number of blocks that it holds.
    """

    medium = Medium.DISK

    def __init__(self, slots: int) -> None:
        self._index = SlotIndex(slots)
        self._tickets = itertools.count(1)
        self._results: list[BlockResult] = []
        self._written = 0

    @property
    def figures(self) -> TierFigures:
        index = self._index
        evictions = index.evictions
        return TierFigures(
            len(index), index.num_slots, self._written, evictions, 0, 0, {}, {}, 0, Traffic()
        )

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        return self._index.present(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._index.touch(keys)

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], priority: Priority) -> int:
        ticket = next(self._tickets)
        for position, has in enumerate(self._index.present(keys)):
            outcome = Outcome.DONE if has else Outcome.MISSING
            self._results.append(BlockResult(ticket, position, outcome))
        return ticket

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        ticket = next(self._tickets)
        index = self._index
        fresh = [key for key, has in zip(keys, index.has_all(keys), strict=True) if not has]
        # As in a disk tier, a prefix counts as used from its end to its beginning.
        slots = index.reserve_all(fresh)
        dropped = set(fresh[len(slots) :])
        for position, key in enumerate(keys):
            outcome = Outcome.DROPPED if key in dropped else Outcome.DONE
            self._results.append(BlockResult(ticket, position, outcome))
        for slot in slots:
            index.publish(slot, _NO_CHECKSUM)
        self._written += len(slots)
        return ticket

    def poll(self) -> list[BlockResult]:
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """Nothing waits."""

    def hung(self, ticket: int) -> Collection[int]:
        return ()

    def raise_priority(self, ticket: int, priority: Priority) -> None:
        """Nothing waits."""

    def clear(self) -> None:
        self._index.clear()

    def watch(self) -> None:
        self._index.watch()

    @property
    def has_news(self) -> bool:
        return False

    @property
    def has_changes(self) -> bool:
        return self._index.has_changes

    def drain_changes(self, limit: int) -> dict[bytes, bool]:
        return self._index.drain_changes(limit)

    def drain(self) -> bool:
        self._results.clear()
        return True

    def begin_close(self, flush_seconds: float) -> None:
        """Nothing waits."""

    def close(self, flush_seconds: float = 0.0) -> bool:
        return True
