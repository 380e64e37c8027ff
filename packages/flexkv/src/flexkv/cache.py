# SPDX-License-Identifier: Apache-2.0
"""KVCache: what an adapter's scheduler side talks to.

Nothing here copies and nothing blocks. `load` and `store` reserve and return a transfer, which
the adapter hands to its workers; their movers report on the completion board; `poll` reads the
board and publishes or releases. What lower tiers have comes into the arena by `fetch`, and is
loaded from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable, Sequence

from flexkv.changes import Change, Medium, take_newest
from flexkv.counters import Counters, Latencies, TierCounters
from flexkv.eviction import UNKNOWN_REQUEST, AnyPolicy, RequestContext
from flexkv.host.arena import Arena
from flexkv.index import Block, block_index
from flexkv.mover import Direction, Status
from flexkv.pins import Pins
from flexkv.presence import Presence, presence_below
from flexkv.tiers.base import AttachedTier, TierFigures
from flexkv.tiers.job import Priority
from flexkv.transfer.copies import DeviceLink, Transfer
from flexkv.transfer.fetch import Fetch
from flexkv.transfer.lower import LowerTiers

logger = logging.getLogger(__name__)

_PIN_SHARE = 2
"""At most half of the arena can be pinned: what is not must hold what is being stored and fetched,
and what is worth keeping of all others."""

_CHANGES = 2048
"""Changes of a tier told at once: more than a step makes, and for some milliseconds' work. Only
what a disk held at the start, or a reset, takes several calls."""


class KVCache:
    """The cache of one engine: an index over the slots of an arena, and what lies below it.
    Single-threaded.

    Args:
        arena: attached, and owned by the caller. Its board's cells are handed out here, so one
            process must have only one KVCache on it.
        policy: decides what leaves when the arena is full.
        tiers: lower tiers, the fastest first; owned.
        pin_seconds: how long a pin lasts of which nothing else is said.

    Attributes:
        latencies: of what has ended.
    """

    def __init__(
        self,
        arena: Arena,
        policy: AnyPolicy,
        tiers: Sequence[AttachedTier] = (),
        *,
        pin_seconds: float = 3600.0,
    ) -> None:
        self._block_bytes = sum(arena.spec.format.shard_bytes)
        self._slot_bytes = arena.spec.format.slot_bytes
        self._index = block_index(arena.spec.num_slots, policy)
        self._pins = Pins(self._index, arena.spec.num_slots // _PIN_SHARE)
        self._pin_seconds = pin_seconds
        self._counters = Counters()
        self.latencies = Latencies()
        self._off = False
        self._stopped = False
        self._device = DeviceLink(arena.board, self.latencies)
        self._below = LowerTiers(self._index, arena.slot_view, tiers, self.latencies)
        self._below.register(arena.address + arena.spec.slots_offset, arena.spec.slots_bytes)

    @property
    def counters(self) -> Counters:
        self._counters.evicted_blocks = self._index.evictions
        self._counters.add_up(self._below.counters)
        return self._counters

    @property
    def ready_blocks(self) -> int:
        return len(self._index)

    @property
    def num_slots(self) -> int:
        """Blocks that host memory can hold."""
        return self._index.num_slots

    @property
    def slot_bytes(self) -> int:
        """What a block takes, in every tier."""
        return self._slot_bytes

    @property
    def pinned_blocks(self) -> int:
        self._pins.expire(time.monotonic())
        return self._index.pinned_blocks

    @property
    def transfers_under_way(self) -> int:
        """Loads and stores that have not ended."""
        return len(self._device)

    @property
    def loading_blocks(self) -> int:
        """Blocks of the loads that have not ended."""
        return self._device.loading_blocks

    @property
    def tier_figures(self) -> list[tuple[Medium, TierFigures, TierCounters]]:
        """Of each lower tier, with what was fetched from it and demoted to it."""
        return self._below.figures

    @property
    def has_lower_tiers(self) -> bool:
        """Whether anything can be fetched."""
        return bool(self._below)

    @property
    def must_ask(self) -> bool:
        """Whether a lower tier has to be asked which blocks it has."""
        return self._below.must_ask

    @property
    def busy(self) -> bool:
        """Whether `poll` may find anything."""
        return bool(self._device) or self._below.busy

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many blocks of this prefix can be loaded, from the first key on. No side effect."""
        return 0 if self._off else self._index.lookup(keys)

    def presence(self, keys: Sequence[bytes]) -> list[Presence]:
        """Where the block of each key is. No side effect."""
        if self._off:
            return [Presence.ABSENT] * len(keys)
        there = self._index.present(keys)
        if not self._below:
            return [Presence.HOST if each else Presence.ABSENT for each in there]
        absent = [key for key, each in zip(keys, there, strict=True) if not each]
        below = iter(self._below.look(absent) if absent else ())
        return [Presence.HOST if each else presence_below(next(below)) for each in there]

    def ask(self, keys: Sequence[bytes]) -> bool:
        """Have lower tiers find out which of these blocks they have, those that do not know.

        Returns:
            Whether an answer is awaited; it comes within the deadline of each tier that is asked.
        """
        return not self._off and self._below.fetcher.ask(keys)

    def record(
        self,
        keys: Sequence[bytes],
        context: RequestContext = UNKNOWN_REQUEST,
        prompt: Sequence[bytes] | None = None,
    ) -> None:
        """A scheduled request uses a prefix that somebody had, the engine itself included: count
        that wherever its blocks are, and offer them to lower tiers as admission says.

        Call it once for each request, whose prefix may be long: it is counted by later polls.

        Args:
            keys: of the blocks that the request found, first block first.
            context: what is known of the request; for the eviction policy.
            prompt: of all blocks of its prompt, found or not; None if they are not known.
        """
        self._index.began(keys if prompt is None else prompt, context, time.monotonic())
        self._below.used(keys, hit=context)

    def ended(self, request_id: str, output_tokens: int) -> None:
        """The request that was recorded with this id has ended, after so many tokens of answer."""
        self._index.ended(request_id, output_tokens, time.monotonic())

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request ends with this prefix, which it found or made: its end leaves every tier before
        its beginning. Counted by later polls."""
        self._below.used(keys, hit=None)

    def load(self, keys: Sequence[bytes]) -> Transfer | None:
        """Lease the blocks of `keys`, all of them ready, for a copy into the engine.

        Returns None if one of them is not, or too much is under way: then it is a miss.
        """
        blocks = None if self._off else self._index.lease(keys)
        if blocks is None:
            return None
        transfer = self._device.begin(Direction.LOAD, blocks)
        if transfer is None:
            self._index.release(blocks)
            return None
        self._counters.loads += 1
        return transfer

    def fetch(self, keys: Sequence[bytes], priority: Priority = Priority.LOAD) -> Fetch | None:
        """Bring what lower tiers have of this prefix into the arena, where `lookup` finds it.

        Args:
            keys: the prefix from some block on, first block first.
            priority: LOAD if a request waits, PREFETCH if it is still queued.

        Returns:
            What to watch until it is `done`, then to end; its blocks stay in the arena until
            then. None if no lower tier has anything to add.
        """
        if self._off or not self._below:
            return None
        return self._below.fetcher.begin(keys, priority)

    def hasten(self, fetch: Fetch) -> None:
        """A request waits now for what was a prefetch."""
        self._below.fetcher.hasten(fetch)

    def end_fetch(self, fetch: Fetch) -> None:
        """Let the blocks of a fetch go, come or not. Idempotent."""
        self._below.fetcher.end(fetch)

    def missing(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        """Positions, from `start` on, of the keys whose blocks have no slot."""
        index = self._index
        return [i for i in range(start, len(keys)) if keys[i] not in index]

    def is_demoting(self, key: bytes) -> bool:
        """Whether the block of `key` is being written to a lower tier, which may have it soon."""
        return self._below.is_demoting(key)

    def store(
        self, keys: Sequence[bytes], positions: Sequence[int], begins: Iterable[int] = (0,)
    ) -> Transfer | None:
        """Reserve slots for blocks of a prefix, or of several one behind another.

        Args:
            keys: blocks of which each builds on the one before, first block first. They may begin
                anywhere in the prefix: one block before those to store is enough.
            positions: which of them to store, ascending; those that have a slot are left out.
            begins: positions of blocks that build on none.

        Returns:
            A transfer of those blocks of `positions`, in order, that slots could be had for, or
            None if there is none. The prefix itself is never evicted to make room for its own end,
            and what has no predecessor in the arena is not stored.
        """
        if self._off:
            return None
        self._pins.expire(time.monotonic())
        index = self._index
        blocks = index.reserve_all(keys, positions, begins)
        if len(blocks) < len(positions):
            refused = {keys[i] for i in positions if keys[i] not in index}
            self._counters.refused_blocks += len(refused)
        if not blocks:
            return None
        transfer = self._device.begin(Direction.STORE, blocks)
        if transfer is None:
            self._counters.refused_blocks += len(blocks)
            self._index.abandon(blocks)
            return None
        self._counters.stores += 1
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Take back a transfer that no worker was told of."""
        self._device.cancel(transfer)
        if transfer.direction is Direction.STORE:
            self._index.abandon(transfer.blocks)
            self._below.stored(transfer.blocks, False)
        else:
            self._index.release(transfer.blocks)

    def discard(self, blocks: Sequence[Block]) -> None:
        """What a store under way copies into these of its blocks has been overwritten: they are
        never found."""
        self._index.discard(blocks)

    def poll(self) -> list[Transfer]:
        """Finish what ranks and lower tiers have reported: publish stores, release loads.

        Returns the transfers with the engine that finished, their status DONE or FAILED.
        """
        self._below.poll()
        finished = self._device.poll()
        for transfer in finished:
            count = len(transfer.blocks)
            if transfer.direction is Direction.STORE:
                self._finish_store(transfer, count)
            else:
                self._finish_load(transfer, count)
        if any(transfer.status is Status.FAILED for transfer in finished) and not self._stopped:
            self._check_ranks()
        return finished

    def pin(
        self, keys: Sequence[bytes], owner: Hashable = None, seconds: float | None = None
    ) -> None:
        """Keep the blocks of a prefix in the arena, those that are there or on their way. What
        would exceed half of the arena is not pinned, and counted.

        Args:
            keys: of the prefix.
            owner: who may end this by `unpin`; a block stays as long as one owner pins it.
            seconds: after which it ends, counted anew from each call; None takes `pin_seconds`.
        """
        now = time.monotonic()
        self._pins.expire(now)
        until = now + (self._pin_seconds if seconds is None else seconds)
        refused = self._pins.pin(keys, owner, until)
        if refused and not self._counters.refused_pins:
            logger.warning(
                "half of the %d blocks of host memory are pinned; no more are (logged once)",
                self._index.num_slots,
            )
        self._counters.refused_pins += refused

    def unpin(self, owner: Hashable = None) -> None:
        """End all pins of `owner`."""
        self._pins.unpin(owner)

    def watch(self) -> None:
        """From now on keep what `take_changes` tells; all that is there already is a change."""
        self._index.watch()
        self._below.watch()

    def take_changes(self) -> list[Change]:
        """Blocks that became loadable or ceased to be, or may have, since the last call; none
        without `watch`. Much at once comes in several calls, the latest first."""
        index = self._index
        changes = [
            Change(Medium.HOST, key, index.lookup((key,)) == 1)
            for key in take_newest(index.changed, _CHANGES)
        ]
        changes += self._below.take_changes(_CHANGES)
        return changes

    def suspend(self) -> None:
        """Find, load and store nothing until a `clear` succeeds: all blocks may be outdated."""
        self._off = True

    def clear(self) -> None:
        """Forget every block, in lower tiers too. Safe with transfers under way: their blocks are
        not published. If it raises, the cache is suspended."""
        self.suspend()
        self._index.clear()
        self._pins.clear()
        self._below.clear()
        self._counters.resets += 1
        self._off = self._stopped

    def close(self, flush_seconds: float = 0.0) -> bool:
        """Finish what ranks have reported, and end the lower tiers, which write what waits; see
        `LowerTier.close`. False if one hangs: then the arena must stay mapped."""
        self.poll()
        return self._below.close(flush_seconds)

    def _check_ranks(self) -> None:
        """If a rank has ended its copies, every load would fail: have nothing any more. What is on
        disk stays for the next process."""
        stopped = self._device.stopped_ranks
        if not stopped:
            return
        self._off = self._stopped = True
        self._index.clear()
        self._pins.clear()
        self._below.fetcher.clear()
        logger.error(
            "rank %s has ended its copies after an error (see its log); loads and stores are "
            "disabled; restart the engine to use the cache again",
            ", ".join(map(str, stopped)),
        )

    def _finish_store(self, transfer: Transfer, count: int) -> None:
        if transfer.status is Status.DONE:
            self._index.publish(transfer.blocks)
            self._counters.stored_blocks += count
            self._counters.stored_bytes += count * self._block_bytes
        else:
            self._index.abandon(transfer.blocks)
            self._counters.failed_stores += 1
            if self._counters.failed_stores == 1:
                logger.warning("a store of %d blocks failed; not cached (logged once)", count)
        self._below.stored(transfer.blocks, transfer.status is Status.DONE)

    def _finish_load(self, transfer: Transfer, count: int) -> None:
        if transfer.status is Status.DONE:
            self._counters.loaded_blocks += count
            self._counters.loaded_bytes += count * self._block_bytes
        else:
            self._counters.failed_loads += 1
            self._index.drop(transfer.blocks)
            if self._counters.failed_loads == 1:
                logger.warning("a load of %d blocks failed; dropped (logged once)", count)
        self._index.release(transfer.blocks)
