# SPDX-License-Identifier: Apache-2.0
"""KVCache, the cache that an adapter's scheduler side calls.

Nothing here copies bytes or waits. `load` and `store` reserve blocks and return a transfer, which
the adapter passes to its workers. The workers' movers report on the completion board. `poll` reads
the board, then publishes or releases the blocks. `fetch` brings blocks of lower tiers into the
arena, from where they are loaded.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from flexkv.client import (
    CacheInfo,
    CacheStatus,
    Ended,
    FetchId,
    FetchState,
    Hold,
    Reset,
    Transfer,
    TransferEnd,
)
from flexkv.eviction import UNKNOWN_REQUEST, AnyPolicy, RequestContext, TenantPolicies
from flexkv.figures.counters import Counters, ResetCause
from flexkv.figures.definitions import HostFigures
from flexkv.figures.meter import Figures, Meter
from flexkv.figures.tenant_samples import tenant_samples
from flexkv.host.arena import Arena
from flexkv.index.ages import BlockAges, bind_ages
from flexkv.index.block_index import BlockRow, Buffer, block_index, publish
from flexkv.index.pins import HostPins
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.job import Priority, Urgency
from flexkv.transfer.copies import DeviceCopy, DeviceLink, log_stopped
from flexkv.transfer.stack import TierStack
from flexkv.types.changes import Changes, Medium, changes_of, take_oldest
from flexkv.types.mover import Direction
from flexkv.types.presence import Presence, presence_below
from flexkv.types.tenants import NO_TENANT, tenant_number
from flexkv.types.troubles import Trouble

logger = logging.getLogger(__name__)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_CHANGES = 2048
"""The most changes of a tier that one call returns: more than a step makes, some ms."""

_REMOVED_BLOCKS = 256
"""Blocks that a poll removes because of their age: about a millisecond."""

_SWEPT_SLOTS = 512
"""Slots that a poll looks at for blocks of before a reset, in 0.15 ms. Stores find some without."""


def _sound(
    method: Callable[Concatenate[KVCache, _Args], _Result],
) -> Callable[Concatenate[KVCache, _Args], _Result]:
    """A method of the cache after whose errors the cache has to recover."""

    @wraps(method)
    def call(self: KVCache, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.reset(Reset.RECOVER)
            raise

    return call


class KVCache:
    """The cache of one engine: an index over the slots of an arena, and the tiers below it. The
    CacheClient of programs that have the cache in their own process. Single-threaded.

    An error between two steps of a call may lose a lease, a reserved slot or a copy. So the cache
    recovers: it stores and fetches nothing until the lower tiers have ended what they do, or their
    calls count as hung. Then it ends all leases and writes but those of transfers and hung calls
    under way, and goes on with the ready blocks. A tier with a hung call is left out until that
    ends.

    Args:
        arena: the arena; borrowed until `close`. This object allocates the cells of its board, so a
            process must have only one KVCache on it.
        tiers: lower tiers, the fastest first; owned.
        pin_seconds: how long blocks are held if `hold` is given no time.
        tenant: number of the tenant for whom blocks count of which the caller names none.
        memory, begun: memory in which other processes read the index; see `block_index`.
        ages: of the blocks; None if they have no greatest age. The disk below has the same object.
    """

    def __init__(
        self,
        arena: Arena,
        policy: AnyPolicy,
        tiers: Sequence[AttachedTier] = (),
        *,
        policy_name: str = "",
        pin_seconds: float = 3600.0,
        tenant: int = NO_TENANT,
        memory: Buffer | None = None,
        begun: bool = False,
        ages: BlockAges | None = None,
    ) -> None:
        self._block_bytes = sum(arena.spec.format.shard_bytes)
        self._policy = policy
        self._tenant, self._has_shares = tenant, isinstance(policy, TenantPolicies)
        self._index = block_index(arena.spec.num_slots, policy, memory, begun=begun)
        self._ages = ages
        bind_ages(self._index, ages, memory)
        self._pins = HostPins(self._index, pin_seconds)
        self._counters = Counters()
        self._meter = Meter()
        self._off = self._stopped = self._recovering = False
        self._device: DeviceLink[BlockRow] = DeviceLink(arena.board, self._meter)
        self._below = TierStack(self._index, arena.slot_view, tiers, self._meter)
        self._has_tiers, self._uses = bool(tiers), self._below.uses.waiting
        self.demote, self.sync = self._below.demote, self._below.sync
        self.describe, self.fetch_state = self._below.describe, self._below.fetcher.state
        self.info = CacheInfo(
            num_slots=arena.spec.num_slots,
            slot_bytes=arena.spec.format.slot_bytes,
            media=tuple(each.tier.medium for each in tiers),
            must_query=self._below.must_query,
            policy_name=policy_name,
            drops_old=ages is not None,
            takes_tenants=self._has_shares and tenant == NO_TENANT,
        )
        self._below.register(arena.address + arena.spec.slots_offset, arena.spec.slots_bytes)

    @property
    def counters(self) -> Counters:
        """The counts so far: one object, brought up to date by each access."""
        self._counters.evicted_blocks = self._index.evictions
        self._counters.refused_pins = self._pins.refused
        self._counters.add_up(self._below.counters)
        return self._counters

    @property
    def ready_blocks(self) -> int:
        """The number of blocks in the arena that can be loaded."""
        return len(self._index)

    @property
    @_sound
    def pinned_blocks(self) -> int:
        """The number of blocks in the arena that pins keep. Ends pins whose time is over."""
        self._pins.expire(time.monotonic())
        return self._index.pinned_blocks

    def figures(self) -> Figures:
        info = self.info
        host = HostFigures(
            self.counters,
            len(self._index),
            info.num_slots,
            info.slot_bytes,
            self.pinned_blocks,
            self._trouble,
            len(self._device.unreported),
            info.policy_name,
            self._policy.guard_state(),
        )
        read = self._meter.read(host, self._below.figures(info.slot_bytes))
        if isinstance(self._policy, TenantPolicies):
            slots = self._index.tenants
            read.shared.update(
                tenant_samples(
                    (name, slots[tenant_number(name)], part * info.num_slots)
                    for name, part in self._policy.shares.items()
                )
            )
        return read

    @property
    def slots_of_tenants(self) -> Mapping[int, int]:
        return self._index.tenants

    @property
    def status(self) -> CacheStatus:
        index = self._index
        return CacheStatus(
            disabled=self._off,
            is_full=not index.free_slots,
            is_silent=False,
            awaits_slots=False,
            has_changes=bool(index.changes or (index.stale_blocks and index.changes is not None))
            or (self._has_tiers and self._below.has_changes),
            awaits_changes=False,
            under_way=self._device.under_way,
            publishing=(),
        )

    @property
    def _trouble(self) -> Trouble | None:
        if self._off:
            return Trouble.STOPPED if self._stopped else Trouble.SUSPENDED
        return Trouble.RECOVERING if self._recovering else None

    @property
    def busy(self) -> bool:
        # An engine asks this twice a step: without a tier, no call is needed.
        if self._device.unreported or self._index.stale_blocks or self._uses or self._recovering:
            return True
        if self._ages is not None and self._ages.is_due and not self._off:
            return True
        return self._has_tiers and self._below.busy

    def lookup(self, keys: Sequence[bytes]) -> int:
        found = 0 if self._off else self._index.lookup(keys)
        return found if self._ages is None else self._ages.count_young(keys[:found])

    def presence(self, keys: Sequence[bytes]) -> list[Presence]:
        if self._off:
            return [Presence.ABSENT] * len(keys)
        there = self._present(keys)
        if not self._has_tiers or self._recovering:
            return [Presence.HOST if each else Presence.ABSENT for each in there]
        absent = [key for key, each in zip(keys, there, strict=True) if not each]
        below = iter(self._below.contains(absent) if absent else ())
        return [Presence.HOST if each else presence_below(next(below)) for each in there]

    def where(self, keys: Sequence[bytes]) -> dict[Medium, Sequence[bool | None]]:
        # The index's calls hold the GIL to their end.
        host = [False] * len(keys) if self._off else self._present(keys)
        return {Medium.HOST: host} | self._below.where(keys)

    @_sound
    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> bool:
        if self._off or self._recovering:
            return False
        return self._below.fetcher.query(keys, scattered)

    @_sound
    def record(
        self,
        keys: Sequence[bytes],
        context: RequestContext = UNKNOWN_REQUEST,
        prompt: Sequence[bytes] | None = None,
    ) -> None:
        whole, now = keys if prompt is None else prompt, time.monotonic()
        if self._tenant:
            context = replace(context, tenant=self._tenant)
        self._index.began(whole, context, now)
        for tier in self._below.indexed:
            tier.began(whole, context, now)
        self._below.uses.note(keys, hit=context)

    def ended(self, request_id: str, output_tokens: int) -> None:
        now = time.monotonic()
        self._index.ended(request_id, output_tokens, now)
        for tier in self._below.indexed:
            tier.ended(request_id, output_tokens, now)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._below.uses.note(keys, hit=None)

    @_sound
    def load(self, keys: Sequence[bytes]) -> Transfer | None:
        old = self._ages is not None and self._ages.count_young(keys) < len(keys)
        blocks = None if self._off or old else self._index.lease(keys)
        if blocks is None:
            return None
        transfer = self._device.begin(Direction.LOAD, keys, blocks, held=False)
        if transfer is None:
            self._index.release(blocks)
            return None
        self._counters.loads += 1
        return transfer

    @_sound
    def fetch(
        self,
        keys: Sequence[bytes],
        *,
        queued: bool = False,
        tenant: int | None = None,
        announced: int = 0,
        priority: int = 0,
    ) -> FetchId | None:
        if self._off or self._recovering or not self.info.may_fetch:
            return None
        urgency = Urgency(Priority.PREFETCH if queued else Priority.LOAD, -priority)
        own = (self._tenant if tenant is None else tenant) if self._has_shares else NO_TENANT
        return self._below.fetcher.begin(keys, urgency, own, announced)

    @_sound
    def extend_fetch(
        self, fetch: FetchId, keys: Sequence[bytes] = (), *, raise_priority: bool = False
    ) -> bool:
        if self._off or self._recovering:
            return False
        return self._below.fetcher.extend(fetch, keys, raise_priority=raise_priority)

    @_sound
    def end_fetch(self, fetch: FetchId) -> FetchState:
        return self._below.fetcher.end(fetch)

    def missing(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        found = self._index.missing(keys[start:] if start else keys)
        return [start + i for i in found] if start else found

    @_sound
    def store(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Collection[int] = (0,),
        *,
        held: bool = False,
        tenants: Sequence[int] | None = None,
    ) -> Transfer | None:
        if self._off or self._recovering:
            return None
        self._pins.expire(time.monotonic())
        if not self._has_shares:
            tenants = None
        elif tenants is None:
            tenants = [self._tenant] * len(keys)
        blocks = self._below.reserve(keys, positions, prefix_starts, tenants)
        if len(blocks) < len(positions):
            absent = set(positions).intersection(self._index.missing(keys))
            self._counters.refused_blocks += len({keys[i] for i in absent})
        if not blocks:
            return None
        transfer = self._device.begin(Direction.STORE, keys, blocks, held=held)
        if transfer is None:
            self._counters.refused_blocks += len(blocks)
            self._index.abandon(blocks)
            return None
        self._counters.stores += 1
        return transfer

    def end_transfer(
        self, transfer_id: int, end: TransferEnd, positions: Collection[int] | None = None
    ) -> None:
        match end:
            case TransferEnd.CONFIRM:
                self._device.confirm(transfer_id)
            case TransferEnd.CANCEL:
                self._cancel(transfer_id)
            case TransferEnd.DISCARD:
                self._discard(transfer_id, positions)

    @_sound
    def _cancel(self, transfer_id: int) -> None:
        copy = self._device.cancel(transfer_id)
        if copy is None:
            return
        if copy.transfer.direction is Direction.STORE:
            self._index.abandon(copy.blocks)
            self._below.stored(copy.transfer.keys, False)
        else:
            self._index.release(copy.blocks)

    @_sound
    def _discard(self, transfer_id: int, positions: Collection[int] | None) -> None:
        blocks = self._device.blocks_of(transfer_id)
        if blocks is not None:
            chosen = blocks if positions is None else [blocks[i] for i in positions]
            self._index.discard(chosen)

    @_sound
    def poll(self) -> list[Ended]:
        if self._recovering:
            self._recover()
        else:
            self._below.poll()
            self._remove_old()
        self._index.sweep(_SWEPT_SLOTS)
        ended = self._device.poll(self._finish)
        if ended and not self._stopped and not all(each.done for each in ended):
            stopped = self._device.stopped_ranks
            if stopped:  # every load would fail
                self._stop()
                log_stopped(stopped)
        return ended

    @_sound
    def hold(
        self,
        kind: Hold,
        keys: Sequence[bytes],
        owner: Hashable = None,
        seconds: float | None = None,
    ) -> None:
        if kind is Hold.PIN:
            self._pins.pin(keys, owner, seconds, time.monotonic())
        else:
            self._pins.retain(keys, owner, seconds, time.monotonic())

    @_sound
    def unhold(self, kind: Hold, owner: Hashable = None, keys: Sequence[bytes] = ()) -> bool:
        if kind is Hold.PIN:
            return self._pins.unpin(owner, time.monotonic())
        self._pins.release(keys, owner)
        return False

    @_sound
    def remove(self, keys: Sequence[bytes]) -> int:
        if self._off or self._recovering:
            return len(keys)
        self._drop(keys)
        return len(keys) - len(self._index.missing(keys)) + self._below.remove(keys)

    def watch(self, *, lower: bool = False) -> None:
        if not lower:
            self._index.watch()
        self._below.watch()

    def drain_changes(self) -> list[Changes]:
        changes = self._index.changes
        if changes is None:
            return []
        self._index.sweep(_CHANGES)
        below = self._below.drain_changes(_CHANGES)  # first: it may raise
        return changes_of(Medium.HOST, take_oldest(changes, _CHANGES)) + below

    def reset(self, kind: Reset, cause: str = ResetCause.REQUEST) -> None:
        match kind:
            case Reset.SUSPEND:
                self._off = True
            case Reset.CLEAR:
                self._forget(cause, self._below.clear)
            case Reset.EMPTY:
                self._forget(ResetCause.REQUEST, self._below.empty)
            case Reset.RENEW:
                self._forget(cause, self._below.renew)
            case Reset.PAUSE:
                self._pause()
            case Reset.STOP:
                self._stop()
            case Reset.RECOVER:
                self._recovering = True

    @_sound
    def _pause(self) -> None:
        for copy in self._device.stores:
            self._index.discard(copy.blocks)
        self._counters.count_reset(ResetCause.PAUSE)

    def _stop(self) -> None:
        self._off = True
        if not self._stopped:
            self._index.clear()
            self._pins.clear()
            self._below.fetcher.clear()
            self._stopped = True

    def close(self, flush_seconds: float = 0.0) -> bool:
        try:
            self.poll()
        except Exception as error:  # noqa: BLE001 - tiers and arena would never be closed
            logger.error("the last results of copies are lost while the cache closes: %r", error)
        return self._below.close(flush_seconds)

    def _note_stored(self, blocks: BlockRow) -> None:
        if self._ages is not None:
            self._ages.note(blocks.keys, slots=blocks.slots)

    @_sound
    def _forget(self, cause: str, forget_below: Callable[[], None]) -> None:
        self._off = True
        self._index.clear()
        self._pins.clear()
        if self._ages is not None:
            self._ages.clear()
        self._counters.count_reset(ResetCause(cause))
        forget_below()
        self._off = self._stopped

    def _present(self, keys: Sequence[bytes]) -> list[bool]:
        there = self._index.present(keys)
        if self._ages is None:
            return there
        return [a and b for a, b in zip(there, self._ages.are_young(keys), strict=True)]

    def _drop(self, keys: Sequence[bytes]) -> None:
        """Remove the ready blocks of `keys` from host memory."""
        index = self._index
        for key in itertools.compress(keys, index.present(keys)):
            blocks = index.lease([key])  # None if it built on one that has just left
            if blocks is not None:
                index.drop(blocks)
                index.release_unused(blocks)
        self._below.fetcher.cut_dropped()

    def _remove_old(self) -> None:
        if self._ages is not None and self._ages.is_due and not self._off:
            before = len(self._index)
            self._ages.remove_old(_REMOVED_BLOCKS, self._drop)
            self._counters.expired_blocks += before - len(self._index)
            for tier in self._below.indexed:
                tier.remove_old()

    def _recover(self) -> None:
        if self._below.drain():
            loaded, stored = (
                [block for row in self._device.rows_in_use(each) for block in row]
                for each in (Direction.LOAD, Direction.STORE)
            )
            read, written = self._below.kept
            self._index.settle([*loaded, *written], [*stored, *read], self._pins.recount())
            self._recovering = False

    def _finish(self, copy: DeviceCopy[BlockRow]) -> None:
        is_store = copy.transfer.direction is Direction.STORE
        (self._finish_store if is_store else self._finish_load)(copy, len(copy.blocks))

    def _finish_store(self, copy: DeviceCopy[BlockRow], count: int) -> None:
        if copy.done:
            self._note_stored(copy.blocks)
            publish(self._index, copy.blocks)
            self._counters.stored_blocks += count
            self._counters.stored_bytes += count * self._block_bytes
        else:
            self._index.abandon(copy.blocks)
            self._counters.failed_stores += 1
            if self._counters.failed_stores == 1:
                logger.warning("a store of %d blocks failed; not cached (logged once)", count)
        self._below.stored(copy.transfer.keys, copy.done)

    def _finish_load(self, copy: DeviceCopy[BlockRow], count: int) -> None:
        if copy.done:
            self._counters.loaded_blocks += count
            self._counters.loaded_bytes += count * self._block_bytes
        else:
            self._counters.failed_loads += 1
            self._index.drop(copy.blocks)
            self._below.fetcher.cut_dropped()
            if self._counters.failed_loads == 1:
                logger.warning("a load of %d blocks failed; dropped (logged once)", count)
        self._index.release(copy.blocks)
