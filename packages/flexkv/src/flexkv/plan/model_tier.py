# SPDX-License-Identifier: Apache-2.0
"""A model of a disk tier for replays: it keeps and evicts blocks, but no bytes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from flexkv.eviction import OTHERWISE, POLICIES, LRUPolicy, RequestContext
from flexkv.index.slot_index import drain_changes, slot_index
from flexkv.tiers.base import BlockResult, TierFigures, Traffic
from flexkv.tiers.disk.table import CHECKSUM_BYTES
from flexkv.tiers.job import Outcome, Priority, Urgency
from flexkv.types.changes import Medium

_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


class WriteBudget:
    """The most blocks to write in any period of so many seconds.

    Attributes:
        now: the time in seconds, set by the caller.
        refused: the number of blocks beyond the limit so far.
    """

    def __init__(self, blocks: int, seconds: float) -> None:
        self._blocks = blocks
        self._seconds = seconds
        self._written: deque[tuple[float, int]] = deque()
        self._sum = 0
        self.now = 0.0
        self.refused = 0

    def take(self, wanted: int) -> int:
        """Spend up to `wanted` blocks. Returns how many may be written."""
        while self._written and self._written[0][0] < self.now - self._seconds:
            self._sum -= self._written.popleft()[1]
        taken = max(0, min(wanted, self._blocks - self._sum))
        if taken:
            self._written.append((self.now, taken))
            self._sum += taken
        self.refused += wanted - taken
        return taken


class ModelTier:
    """An `IndexedTier` with the index of a disk tier; each read and write ends at once. Buffers are
    neither read nor written.

    Args:
        slots: the number of blocks that it holds.
        policy: name of its eviction policy.
        budget: limit of its writes; None for none.
    """

    medium = Medium.DISK

    def __init__(
        self, slots: int, policy: str = OTHERWISE, budget: WriteBudget | None = None
    ) -> None:
        self._budget = budget
        self._policy = POLICIES[policy](slots)
        self._index = slot_index(slots, self._policy)
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

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        if not isinstance(self._policy, LRUPolicy):
            self._policy.began(keys, context, now)

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        if not isinstance(self._policy, LRUPolicy):
            self._policy.ended(request_id, output_tokens, now)

    def remove_old(self) -> None:
        """Blocks of a trace have no greatest age."""

    def remove(self, keys: Sequence[bytes]) -> None:
        raise NotImplementedError("no trace removes a block")

    def touch(self, keys: Sequence[bytes]) -> None:
        self._index.touch(keys)

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        priority: Priority,
        turn: int = 0,
    ) -> int:
        ticket = next(self._tickets)
        for position, has in enumerate(self._index.present(keys)):
            outcome = Outcome.DONE if has else Outcome.MISSING
            self._results.append(BlockResult(ticket, position, outcome))
        return ticket

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        ticket = next(self._tickets)
        index = self._index
        fresh = [key for key, has in zip(keys, index.has_all(keys), strict=True) if not has]
        allowed = len(fresh) if self._budget is None else self._budget.take(len(fresh))
        # As in a disk tier, a prefix counts as used from its end to its beginning.
        after = after or [None] * len(keys)
        before = dict(zip(keys, after, strict=True))
        slots: list[int] = []
        for key in fresh[:allowed]:
            slot = index.reserve(key, before[key], slots[-1] if slots else None)
            if slot is None:
                break
            slots.append(slot)
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

    def raise_priority(self, ticket: int, urgency: Urgency) -> None:
        """Nothing waits."""

    def clear(self) -> None:
        self._index.clear()

    empty = clear

    def sync(self) -> list[Future[str]]:
        return []

    def watch(self) -> None:
        self._index.watch()

    @property
    def has_news(self) -> bool:
        return False

    @property
    def has_changes(self) -> bool:
        return self._index.has_changes

    def drain_changes(self, limit: int) -> dict[bytes, bool]:
        return drain_changes(self._index, limit)

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        """Nothing emits events."""

    def listed(self) -> Iterator[list[bytes]]:
        yield [key for key in map(self._index.key_of, range(self._index.num_slots)) if key]

    def take_descriptions(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return {}

    def drain(self) -> bool:
        self._results.clear()
        return True

    def begin_close(self, flush_seconds: float) -> None:
        """Nothing waits."""

    def close(self, flush_seconds: float = 0.0) -> bool:
        return True
