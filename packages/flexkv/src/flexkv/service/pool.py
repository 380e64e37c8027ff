# SPDX-License-Identifier: Apache-2.0
"""A pool: the memory, the index and the lower tiers that all engines with the same blocks share."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing

from flexkv.cache import KVCache
from flexkv.eviction import choose_policy
from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.host.memory_file import Pages, create_file
from flexkv.index.block_index import Buffer, index_bytes, publish
from flexkv.layout import BlockFormat
from flexkv.open_tiers import open_tiers, policy_maker
from flexkv.service.line import BELL_BYTES
from flexkv.service.messages import PoolBlocks
from flexkv.session.meet import Session
from flexkv.session.reservation import Reservation
from flexkv.session.wire import SessionInfo
from flexkv.settings import CacheConfig
from flexkv.system.available import Promise

logger = logging.getLogger(__name__)

MOST_ENGINES = 63
"""Engines of a pool at once; each has a completion board in the arena. Not tuned."""

_THREADS = 4
"""Threads that fill an arena. Not tuned."""

_HOLD_BYTES = 2


class SharedCache(KVCache):
    """The cache of a pool. Engines hold its blocks, and write to slots that it grants."""

    def grant(self, most: int) -> list[int]:
        """Up to `most` slots for stores of an engine."""
        return self._index.take_slots(most)

    def is_granted(self, slot: int) -> bool:
        """Whether a slot is granted, and has no block."""
        return self._index.is_taken(slot)

    def give_back(self, slots: Sequence[int]) -> None:
        """Nobody writes any more to slots that were granted."""
        self._index.give_back(slots)

    def adopt(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Blocks that an engine has written to granted slots are ready. A block that is there
        already, or whose predecessor has left, is not kept; its slot becomes free.

        Args:
            keys: keys of blocks, each of which builds on the one before.
            positions: positions in `keys` of the blocks.
            prefix_starts: positions of blocks that begin a prefix.
            slots: for each of `positions` its slot.

        Raises:
            ValueError, IndexError: the arguments do not fit each other, or a slot was not granted.
        """
        try:
            placed = self._index.place(keys, positions, prefix_starts, slots)
            publish(self._index, placed)
            used = set(placed.slots)
            self._index.give_back([slot for slot in slots if slot not in used])
            self._below.stored(placed.keys, True)
        except BaseException:
            self.recover()
            raise
        self._counters.stored_blocks += len(placed)
        self._counters.stored_bytes += len(placed) * self._block_bytes

    def add_reader(self, holds: Buffer) -> int:
        """See `BlockIndex.add_reader`."""
        return self._index.add_reader(holds)

    def remove_reader(self, reader: int) -> None:
        """See `BlockIndex.remove_reader`."""
        self._index.remove_reader(reader)

    def look_at_holds(self) -> int:
        """See `BlockIndex.look_at_holds`."""
        return self._index.look_at_holds()


class SharedPool:
    """One pool. Single-threaded.

    Args:
        config: settings of the service.
        blocks: the blocks of its engines.
        gb: host memory for it, in GiB; None for the default of `cpu_cache_gb`.

    Attributes:
        cache: the cache; owned.
        arena: its memory; owned.
        index_fd: descriptor of the index's memory; owned.
        policy: name of the eviction policy.

    Raises:
        FlexKVError: memory is missing, or a lower tier cannot be used.
    """

    def __init__(self, config: CacheConfig, blocks: PoolBlocks, gb: float | None) -> None:
        block_format = BlockFormat(blocks.engine_blocks, blocks.shard_bytes, blocks.replicas)
        with ExitStack() as undo:
            with closing(Reservation(config.session_root)) as reservation:
                self.arena = Arena.create_planned(
                    lambda promised: _plan(block_format, gb, promised),
                    _THREADS,
                    frozenset(),
                    reservation,
                )
            undo.callback(self.arena.close)
            slots = self.arena.spec.num_slots
            self.index_fd = memory_file(index_bytes(slots))
            undo.callback(os.close, self.index_fd)
            self._memory = mmap.mmap(self.index_fd, index_bytes(slots))
            info = SessionInfo(blocks.fingerprint, self.arena.spec, True, blocks.identity)
            make_policy = policy_maker(config, follows_requests=True)
            self.policy = choose_policy(config.eviction_policy, slots, follows_requests=True)
            self.cache = SharedCache(
                self.arena,
                make_policy(slots),
                open_tiers(config, Session(info, self.arena), make_policy),
                policy_name=self.policy,
                pin_seconds=config.pin_seconds,
                memory=self._memory,
            )
            self.cache.watch()
            undo.pop_all()

    @property
    def num_slots(self) -> int:
        """Slots of the arena."""
        return self.arena.spec.num_slots

    def make_holds(self) -> tuple[int, memoryview, memoryview]:
        """Memory for the holds of one engine, and its bell; see `Line`.

        Returns:
            Its descriptor, which the caller closes, the holds, and the bell.
        """
        size = _HOLD_BYTES * self.num_slots
        total = -(-size // BELL_BYTES) * BELL_BYTES + BELL_BYTES
        fd = memory_file(total)
        view = memoryview(mmap.mmap(fd, total))
        return fd, view[:size], view[total - BELL_BYTES :].cast("I")

    def close(self, flush_seconds: float) -> None:
        """Close the lower tiers, which may write waiting blocks for `flush_seconds`, and leave the
        memory to the engines that have it."""
        if self.cache.close(flush_seconds):
            self.arena.close()
        os.close(self.index_fd)


def memory_file(size: int) -> int:
    """A sealed memory file of `size` bytes; its descriptor, which the caller closes."""
    return create_file(size, Pages.ORDINARY)


def _plan(block_format: BlockFormat, gb: float | None, promised: Sequence[Promise]) -> ArenaSpec:
    spec = plan_arena(block_format, gb, promised)
    return ArenaSpec(block_format, spec.num_slots, boards=1 + MOST_ENGINES)
