# SPDX-License-Identifier: Apache-2.0
"""An engine's cache with the objects that map its blocks to the engine's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from flexkv.adapter.engine import Describe
from flexkv.adapter.groups import Groups
from flexkv.adapter.guard import Edge
from flexkv.adapter.keys import BlockKeys
from flexkv.adapter.recorder import Recorder
from flexkv.cache import KVCache
from flexkv.host.session import Session
from flexkv.mover import Direction, Status
from flexkv.transfer.copies import Transfer


@dataclass(frozen=True, slots=True)
class EngineCache:
    """The objects that all parts of a scheduler side share.

    Attributes:
        session: the session with the arena; owned, closed after the cache.
        cache: the cache over the arena; owned.
        groups: groups of the model's layers.
        keys: makes the keys of blocks.
        edge: ends, counts and logs errors of single requests.
        describe: describes blocks for events; None if the engine emits no events.
        ended: transfers that `take_ended` will yield, besides those that the cache finds.
        recorder: records requests for `flexkv plan`; None if nothing is recorded. Owned.
    """

    session: Session
    cache: KVCache
    groups: Groups
    keys: BlockKeys
    edge: Edge
    describe: Describe | None = None
    recorder: Recorder | None = None
    ended: deque[Transfer] = field(default_factory=deque, init=False, repr=False)

    def take_ended(self) -> Iterator[Transfer]:
        """Poll the cache, and yield the loads and stores that have ended. The next call yields
        those again that the caller has not handled because of an error, behind all others."""
        self.ended.extend(self.cache.poll())
        while self.ended:
            self.ended.rotate(-1)
            yield self.ended[-1]
            self.ended.pop()

    def end_lost(self, ordered: AbstractSet[int], running: AbstractSet[int]) -> None:
        """After an error: cancel the transfers that no worker will copy, and let `take_ended` yield
        those as failed whose end was not seen.

        Args:
            ordered: ids of the transfers that workers know or will know.
            running: ids of the transfers whose end the caller expects.
        """
        for transfer in self.cache.transfers:
            if transfer.id not in ordered:
                self.cache.cancel(transfer)
        known = {each.id for each in (*self.cache.transfers, *self.ended)}
        self.ended.extend(
            Transfer(transfer_id, Direction.LOAD, -1, [], Status.FAILED)
            for transfer_id in sorted(running - known)
        )

    def close(self, flush_seconds: float) -> None:
        """Close recorder, cache and session. If a lower tier hangs, the arena stays mapped.

        Args:
            flush_seconds: seconds for which lower tiers may write waiting blocks.
        """
        if self.recorder is not None:
            self.recorder.close()
        if self.cache.close(flush_seconds):
            self.session.close()
