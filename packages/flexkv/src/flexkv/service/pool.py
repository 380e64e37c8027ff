# SPDX-License-Identifier: Apache-2.0
"""A pool: the memory, the index and the lower tiers that all engines with the same blocks share."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from flexkv.cache import KVCache
from flexkv.client import Reset
from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.host.memory_file import Pages, check_seals, create_file
from flexkv.host.memory_lock import MemoryLock
from flexkv.index.block_index import BlockIndex, index_bytes, publish
from flexkv.layout import BlockFormat
from flexkv.open_tiers import ages_of, closed_on_error, host_policy, open_tiers, policy_maker
from flexkv.service.messages import PoolBlocks
from flexkv.service.page import MOST_ENGINES, EnginePage, file_bytes
from flexkv.service.pool_changes import PoolDescriptions
from flexkv.service.pool_keys import AnnouncedKeys, TierKeys
from flexkv.service.state import TenantState
from flexkv.session.reservation import Reservation
from flexkv.session.wire import SessionInfo
from flexkv.settings import GIB, CacheConfig
from flexkv.system.available import Promise
from flexkv.transfer.fetcher import Fetcher
from flexkv.types.changes import Changes
from flexkv.types.errors import ArenaError
from flexkv.types.tenants import NO_TENANT, tenant_number

logger = logging.getLogger(__name__)

_THREADS = 4
"""Threads that fill an arena. Not tuned."""

_SHORT = 8
"""A pool is short of room if evictions have met one in so many of its slots that engines hold. Not
tuned."""

_LISTED = 2048
"""Blocks of one part of `SharedCache.listed`: below a millisecond."""

_DESCRIBED, _LEAST_BYTES = 128, 1 << 20
"""Descriptions of blocks take at most this part of a pool's bytes, and so many at least. Not tuned:
those of Llama-8B's blocks of 16 tokens, 2 MiB each, take 0.02 % for each block in host memory or on
a disk."""

_OWNER = 0
"""The byte of the arena's file that the service has a lock on. Each process of an engine has one on
the byte of the engine's number."""


class SharedCache(KVCache):
    """The cache of a pool. Engines hold its blocks, and write to slots that it grants."""

    @property
    def fetcher(self) -> Fetcher:
        """The fetches of all engines."""
        return self._below.fetcher

    @property
    def index(self) -> BlockIndex:
        """The index. It grants slots to engines, and knows what engines hold."""
        return self._index

    def are_current(self, slots: Sequence[int]) -> bool:
        """Whether all these slots were granted after the pool was cleared, so that no store that
        began before writes to them."""
        return all(map(self._index.is_taken_since_clear, slots))

    def adopt(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Sequence[int],
        slots: Sequence[int],
        tenants: Sequence[int],
    ) -> None:
        """Blocks that an engine has written to granted slots are ready. A block that is there
        already, or whose predecessor has left, is not kept; its slot becomes free.

        Raises ValueError or IndexError if the arguments do not fit each other, or a slot was not
        granted.

        Each of `keys` builds on the one before, but for those at `prefix_starts`. The blocks are at
        `positions`, each of which has its slot in `slots`. `tenants` has a number for each key.
        """
        try:
            placed = self._index.place(keys, positions, prefix_starts, slots, tenants)
            self._note_stored(placed)
            publish(self._index, placed)
            used = set(placed.slots)
            self._index.give_back([slot for slot in slots if slot not in used])
            self._below.stored(placed.keys, True)
        except BaseException:
            self.reset(Reset.RECOVER)
            raise
        self._counters.stored_blocks += len(placed)
        self._counters.stored_bytes += len(placed) * self._block_bytes

    def reported(self, keys: Sequence[bytes]) -> list[bool]:
        """For each of `keys` whether host memory has it by what `drain_changes` has returned."""
        changes = self._index.changes or {}
        return [
            there != (key in changes)
            for key, there in zip(keys, self._index.present(keys), strict=True)
        ]

    def listed(self) -> Iterator[list[bytes]]:
        """Keys of all blocks, a part at a time; they come and leave between two parts."""
        blocks = self._index.blocks
        for start in range(0, len(blocks), _LISTED):
            yield blocks[start : start + _LISTED].keys
        for tier in self._below.indexed:
            yield from tier.listed()


class SharedPool:
    """One pool, which owns its memory (also if this raises), cache and keys. Single-threaded. The
    memory of a service that has ended has begun.

    Raises FlexKVError if a lower tier cannot be used; ValueError if the memory is that of no index.

    Attributes:
        below, announced: keys of the blocks that its disks have, and that its engines store.
        descriptions: what events say of its blocks.
        untold: changes that engines have not been told of.
        prompt_blocks, found_blocks: blocks of the prompts of all engines, and how many of them the
            engines found.
    """

    def __init__(
        self,
        config: CacheConfig,
        model: str,
        blocks: PoolBlocks,
        memory: PoolMemory,
        *,
        begun: bool = False,
    ) -> None:
        with ExitStack() as undo:
            undo.callback(memory.close)
            self.model = model
            self._memory = memory
            self.prompt_blocks = self.found_blocks = self._met_holds = 0
            self.untold: Sequence[Changes] = ()
            self.arena, self.index_fd, self.pages_fd = memory.arena, memory.index, memory.pages
            slots = self.arena.spec.num_slots
            info = SessionInfo(blocks.fingerprint, self.arena.spec, True, blocks.identity)
            make_policy = policy_maker(config, follows_requests=True)
            self._shares = config.tenant_shares
            self.has_shares = bool(self._shares)
            self.policy, policy = host_policy(config, slots, follows_requests=True)
            ages = ages_of(config, slots)
            tiers = open_tiers(config, info, make_policy, ages=ages)
            with closed_on_error(tiers):
                self.cache = SharedCache(
                    self.arena,
                    policy,
                    tiers,
                    policy_name=self.policy,
                    pin_seconds=config.pin_seconds,
                    memory=mmap.mmap(self.index_fd, index_bytes(slots)),
                    begun=begun,
                    ages=ages,
                )
                undo.callback(self.cache.close)
            self.cache.info = replace(self.cache.info, is_shared=True)
            self.cache.watch()
            disk_bytes = int((config.ssd_cache_gb or 0) * GIB)
            self.below = TierKeys(disk_bytes // self.cache.info.slot_bytes)
            undo.callback(self.below.close)
            most_bytes = max(_LEAST_BYTES, slots * self.cache.info.slot_bytes // _DESCRIBED)
            self.descriptions = PoolDescriptions(self.cache, self.below, most_bytes)
            self.announced = AnnouncedKeys(slots, self.cache.fetcher)
            undo.pop_all()

    @property
    def num_slots(self) -> int:
        """Slots of the arena."""
        return self.arena.spec.num_slots

    @property
    def tenants(self) -> tuple[TenantState, ...]:
        """What tenants have, those with a share of their own and all others."""
        if not self._shares:
            return ()
        slots, parts = self.cache.slots_of_tenants, self.num_slots / 100
        named = [
            TenantState(name, slots[tenant_number(name)], percent * parts)
            for name, percent in self._shares
        ]
        rest = max(0.0, self.num_slots - sum(each.share for each in named))
        return (*named, TenantState("", slots[NO_TENANT], rest))

    @property
    def busy(self) -> bool:
        """Whether anything is under way whose end `poll` may find."""
        return bool(self.untold) or self.cache.busy or self.cache.status.has_changes

    def poll(self) -> Sequence[Changes]:
        """See what has ended, and what blocks came and left, if not too many at once. The same
        changes come again until the caller clears `untold`."""
        cache = self.cache
        if cache.busy:
            cache.poll()
        self._met_holds = cache.index.look_at_holds()
        if not self.untold:
            self.untold = cache.drain_changes()
        self.below.note(self.untold, are_all=not cache.status.has_changes)
        return self.untold

    @property
    def is_short(self) -> bool:
        """Whether many blocks could not be evicted, since engines hold them."""
        return self._met_holds > self.num_slots // _SHORT

    def has(self, fd: int) -> bool:
        """Whether a descriptor is that of the pool's arena."""
        return os.path.samestat(os.fstat(fd), os.fstat(self.arena.fd))

    def page_of(self, engine: int) -> EnginePage:
        """The page of the engine of this number, mapped anew."""
        return EnginePage(self.pages_fd, engine, self.num_slots)

    def is_used_by(self, engine: int) -> bool:
        """Whether a living process may write to slots that were granted to the engine of this
        number."""
        return self._memory.lock.is_locked(engine)

    def close(self, flush_seconds: float) -> None:
        """Close the lower tiers, which may write waiting blocks for `flush_seconds`, and leave the
        memory to the engines that have it."""
        self.below.close()
        self.announced.close()
        is_quiet = self.cache.close(flush_seconds)
        self._memory.close(unmap=is_quiet)


class PoolMemory:
    """The memory of a pool: what it takes, or what a service before it has left to the engines. It
    owns the arena, the descriptors of index and engines' pages, and the lock of its only owner.
    Raises ArenaError if another service owns the memory."""

    def __init__(self, arena: Arena, index: int, pages: int) -> None:
        self.arena, self.index, self.pages = arena, index, pages
        try:
            self.lock = MemoryLock(arena.fd, _OWNER, alone=True)
        except BlockingIOError:
            self._close_files()
            raise ArenaError(
                "another service owns the memory of this engine and hangs; allowed: one that has "
                "ended"
            ) from None
        except BaseException:
            self._close_files()
            raise

    @classmethod
    def create(cls, config: CacheConfig, blocks: PoolBlocks) -> PoolMemory:
        """Take memory for a pool, by the settings with the sizes of this pool. Raises ArenaError if
        it is missing."""
        with ExitStack() as undo, closing(Reservation(config.session_root)) as reservation:
            arena = Arena.create_planned(
                lambda promised: _plan(_format_of(blocks), config, promised),
                _THREADS,
                frozenset(),
                reservation,
            )
            undo.callback(arena.close)
            index = memory_file(index_bytes(arena.spec.num_slots))
            undo.callback(os.close, index)
            pages = memory_file(file_bytes(arena.spec.num_slots))
            undo.pop_all()
        return cls(arena, index, pages)

    @classmethod
    def resume(cls, blocks: PoolBlocks, slots: int, fds: Sequence[int]) -> PoolMemory:
        """Take over memory of engines whose service has ended: descriptors of arena, index and
        pages, owned also if this raises.

        Raises ArenaError if they have other sizes, or a service owns the memory; OSError if they
        are no memory files.
        """
        with ExitStack() as undo:
            for fd in fds:
                undo.callback(os.close, fd)
            arena_fd, index, pages = fds
            for fd, size in ((index, index_bytes(slots)), (pages, file_bytes(slots))):
                check_seals(fd)
                found = os.fstat(fd).st_size
                if found != size:
                    raise ArenaError(f"memory for {slots} slots has {found} bytes; allowed: {size}")
            spec = ArenaSpec(_format_of(blocks), slots, boards=1 + MOST_ENGINES)
            undo.pop_all()
            undo.callback(os.close, index)
            undo.callback(os.close, pages)
            arena = Arena(arena_fd, spec)
            undo.pop_all()
        return cls(arena, index, pages)

    def close(self, *, unmap: bool = True) -> None:
        """Close all. Idempotent. With `unmap`, nothing in this process reads or writes the arena
        any more; else it stays mapped."""
        self.lock.close()
        self._close_files(unmap=unmap)

    def _close_files(self, *, unmap: bool = True) -> None:
        if unmap:
            self.arena.close()
        for fd in (self.index, self.pages):
            if fd >= 0:
                os.close(fd)
        self.index = self.pages = -1


def slot_bytes_of(blocks: PoolBlocks) -> int:
    """Bytes of a block in a pool, padding included."""
    return _format_of(blocks).slot_bytes


def memory_file(size: int) -> int:
    """A sealed memory file of `size` bytes; its descriptor, which the caller closes."""
    return create_file(size, Pages.ORDINARY)


def _format_of(blocks: PoolBlocks) -> BlockFormat:
    return BlockFormat(blocks.engine_blocks, blocks.shard_bytes, blocks.replicas)


def _plan(block_format: BlockFormat, config: CacheConfig, promised: Sequence[Promise]) -> ArenaSpec:
    spec = plan_arena(block_format, config.cpu_cache_gb, promised, grows=config.memory_grows)
    return replace(spec, boards=1 + MOST_ENGINES)
