# SPDX-License-Identifier: Apache-2.0
"""ServedCache, the CacheClient of an engine that uses the node's service.

No call waits for the service. Lookups and leases read its index in shared memory, stores take slots
that it has granted ahead, and all else is a message, of which `poll` sends those of a step at once.
If the service ends or hangs, blocks that are in host memory are loaded as before: nobody evicts
them. Nothing is stored or fetched then. The engine attaches again as soon as a service runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace

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
from flexkv.eviction import NO_GUARD, UNKNOWN_REQUEST, RequestContext
from flexkv.figures.counters import Counters, ResetCause
from flexkv.figures.definitions import HostFigures
from flexkv.figures.meter import Figures, Meter
from flexkv.host.arena import Arena
from flexkv.index.ages import young_reader
from flexkv.service import messages as wire
from flexkv.service.attach import Attached, Reattachment
from flexkv.service.line import Line
from flexkv.service.page import FetchRows, LoadHolds
from flexkv.service.pool_changes import PoolChanges
from flexkv.service.served_stores import ServedStores
from flexkv.service.served_tiers import ServedTiers
from flexkv.transfer.copies import DeviceCopy, DeviceLink, log_stopped
from flexkv.types.changes import Medium
from flexkv.types.mover import Direction
from flexkv.types.presence import Presence
from flexkv.types.tenants import NO_TENANT
from flexkv.types.troubles import Trouble

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Slots:
    """Blocks of the pool, as `DeviceLink` takes them."""

    slots: Sequence[int]
    keys: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.slots)


class ServedCache:
    """The cache of one engine among those of its node. Single-threaded. `attached` is owned; the
    arena is borrowed until `close`. `counters` are the counts of this engine so far."""

    def __init__(self, attached: Attached, arena: Arena) -> None:
        spec, answer = arena.spec, attached.answer
        self._attached = attached
        self.info = CacheInfo(
            num_slots=spec.num_slots,
            slot_bytes=spec.format.slot_bytes,
            media=answer.media,
            must_query=answer.asks_stores,
            policy_name=answer.policy,
            is_shared=True,
            takes_tenants=self._takes_tenants(answer.has_shares),
        )
        self._block_bytes = sum(spec.format.shard_bytes)
        self._reader = young_reader(attached.index, attached.page.holds, spec.num_slots)
        self._holds = LoadHolds(self._reader, attached.page.bell[:])
        self._line = Line(attached.connection, attached.page.bell)
        self._tiers = ServedTiers(
            self._reader,
            self._line,
            answer.media,
            below=attached.below,
            announced=attached.announced,
            rows=FetchRows(attached.page.fetches),
            asks_stores=answer.asks_stores,
        )
        self._pins: set[str] = set()
        self._reattachment = Reattachment(attached.connection, attached.resume)
        self._is_alone = False
        self._meter = Meter()
        self.counters = Counters()
        self._device: DeviceLink[_Slots] = DeviceLink(arena.board, self._meter)
        self._stores = ServedStores(self._reader, self._line, self._device.free_cell)
        self._changes = changes = PoolChanges(self._reader, self._line)
        self.watch, self.drain_changes = changes.watch, changes.drain
        self.describe = changes.describe
        self._node = wire.NodeFigures({}, is_suspended=False)
        self._off = self._stopped = self._recovering = False

    # What is there.

    @property
    def busy(self) -> bool:
        if self._device.unreported or self._recovering or self._line.has_news:
            return True
        if self._reattachment.has_made:
            return True
        if self._line.is_cut:
            return not self._is_alone or bool(self._stores.by_id)
        if self._is_silent:
            return False
        # What the service publishes meanwhile can wait for a step that has something to do.
        compares = self._changes.compares(self._tiers.below)
        return bool(self._stores.untold or self._line.busy or compares or self._tiers.awaits_news)

    @property
    def status(self) -> CacheStatus:
        """See `CacheClient.status`. A store takes granted slots, and evicts nothing itself."""
        stores, under_way = self._stores, self._device.under_way
        is_silent = self._is_silent
        return CacheStatus(
            disabled=self._off,
            is_full=False,
            is_silent=is_silent,
            awaits_slots=not (stores.free or self._off or self._recovering or is_silent),
            has_changes=not self._changes.is_empty,
            awaits_changes=self._changes.awaits_changes,
            under_way=under_way,
            publishing=stores.by_id.keys() - under_way.keys(),
        )

    @property
    def _trouble(self) -> Trouble | None:
        if self._off:
            return Trouble.STOPPED if self._stopped else Trouble.SUSPENDED
        if self._is_silent:
            return Trouble.SERVICE
        if self._recovering:
            return Trouble.RECOVERING
        return Trouble.POOL if self._node.is_suspended else None

    def _takes_tenants(self, has_shares: bool) -> bool:
        return has_shares and self._attached.tenant == NO_TENANT

    @property
    def _is_silent(self) -> bool:
        return self._line.is_cut or (self._line.is_silent and not self._stores.has_published)

    def lookup(self, keys: Sequence[bytes]) -> int:
        return 0 if self._off else self._holds.lookup(keys)

    def presence(self, keys: Sequence[bytes]) -> list[Presence]:
        """See `CacheClient.presence`. What shared stores have shows when it is fetched. Blocks that
        cannot be loaded, since loads hold many others, are absent."""
        room = 0 if self._off else self._holds.room
        if room is None or room >= len(keys):
            return self._presence(keys)
        room = max(room, self.lookup(keys))
        return [*self._presence(keys[:room]), *[Presence.ABSENT] * (len(keys) - room)]

    def _presence(self, keys: Sequence[bytes]) -> list[Presence]:
        if self._may_fetch:
            return self._tiers.presence(keys)
        return [Presence.HOST if each else Presence.ABSENT for each in self._reader.present(keys)]

    def where(self, keys: Sequence[bytes]) -> dict[Medium, Sequence[bool | None]]:
        host = [False] * len(keys) if self._off else self._reader.present(keys)
        return {Medium.HOST: host} | self._tiers.where(keys)

    def missing(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        absent = self._reader.missing(keys[start:] if start else keys)
        return [start + i for i in absent if keys[start + i] not in self._stores.keys]

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> bool:
        return self._may_fetch and self._tiers.query(keys, scattered)

    # Loads and stores.

    def load(self, keys: Sequence[bytes]) -> Transfer | None:
        slots = None if self._off else self._holds.lease(keys)
        if not slots:
            return None
        transfer = self._device.begin(Direction.LOAD, keys, _Slots(slots, keys), held=False)
        if transfer is None:
            self._holds.release(slots)
            return None
        self.counters.loads += 1
        return transfer

    def store(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Collection[int] = (0,),
        *,
        held: bool = False,
        tenants: Sequence[int] | None = None,
    ) -> Transfer | None:
        if self._off or self._recovering or self._line.is_cut:
            return None
        store = self._stores.plan(keys, positions, prefix_starts, tenants)
        self.counters.refused_blocks += store.refused
        if store.refused:
            self._stores.announce_nothing()
        if not store.keys:
            return None
        transfer = self._device.begin(
            Direction.STORE,
            store.keys,
            _Slots(store.slots, store.keys),
            held=held,
            keeps_cell=True,
        )
        if transfer is None:
            self._stores.undo(store)
            self.counters.refused_blocks += len(store.keys)
            return None
        if self._stores.begin(transfer.id, transfer.cell, store):
            self._line.send()  # others wait for what this step computes
        self.counters.stores += 1
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
                store = self._stores.by_id.get(transfer_id)
                if store is not None and self._device.blocks_of(transfer_id) is not None:
                    chosen = range(len(store.keys)) if positions is None else positions
                    store.dropped.update(chosen)

    def _cancel(self, transfer_id: int) -> None:
        copy = self._device.cancel(transfer_id)
        if copy is None:
            return
        if copy.transfer.direction is Direction.LOAD:
            self.counters.loads -= 1
            self._holds.release(copy.blocks.slots)
        elif transfer_id in self._stores.by_id:  # else an error came before
            self._stores.undo(self._stores.end(transfer_id))

    # Lower tiers.

    def fetch(
        self,
        keys: Sequence[bytes],
        *,
        queued: bool = False,
        tenant: int | None = None,
        announced: int = 0,
        priority: int = 0,
    ) -> FetchId | None:
        if self._off or not self._may_fetch or self._holds.room == 0:
            return None
        return self._tiers.fetch(keys, queued, tenant, announced, priority)

    def extend_fetch(
        self, fetch: FetchId, keys: Sequence[bytes] = (), *, raise_priority: bool = False
    ) -> bool:
        if self._off or not self._may_fetch:
            return False
        return self._tiers.extend(fetch, keys, raise_priority=raise_priority)

    def fetch_state(self, fetch: FetchId) -> FetchState:
        if self._is_silent:
            return FetchState(time.monotonic())
        return self._tiers.state(fetch)

    def end_fetch(self, fetch: FetchId) -> FetchState:
        state = self.fetch_state(fetch)
        self._tiers.end(fetch)
        return state

    @property
    def _may_fetch(self) -> bool:
        """Whether lower tiers and other engines can give blocks now."""
        return not (self._recovering or self._is_silent)

    # Uses.

    def record(
        self,
        keys: Sequence[bytes],
        context: RequestContext = UNKNOWN_REQUEST,
        prompt: Sequence[bytes] | None = None,
    ) -> None:
        if context.stores and self._off:
            context = replace(context, stores=False)
        whole, found = list(keys if prompt is None else prompt), len(keys)
        is_prefix = not found or (found <= len(whole) and whole[found - 1] == keys[-1])
        others = [] if is_prefix else list(keys)
        # All or none: the service joins those that come to one prompt.
        self._line.put(
            *(wire.RecordUse(part, found, [], None) for part in wire.parts(whole)),
            *(wire.RecordUse([], found, part, None) for part in wire.parts(others)),
            wire.RecordUse([], found, [], context),
        )
        if context.stores and is_prefix and len(whole) > found:
            self._line.send()  # others may wait for what the request computes

    def touch(self, keys: Sequence[bytes]) -> None:
        # The first part last: every tier evicts the end of the prefix before its beginning.
        for part in reversed([*wire.parts(keys)]):
            self._line.put(wire.Touch(part))

    def ended(self, request_id: str, output_tokens: int) -> None:
        self._line.put(wire.RequestEnded(request_id, output_tokens))

    def hold(
        self,
        kind: Hold,
        keys: Sequence[bytes],
        owner: Hashable = None,
        seconds: float | None = None,
    ) -> None:
        if kind is Hold.PIN:
            self._pins.add(repr(owner))
        for part in wire.parts(keys):
            self._line.put(wire.HoldBlocks(kind, part, repr(owner), seconds))

    def unhold(self, kind: Hold, owner: Hashable = None, keys: Sequence[bytes] = ()) -> bool:
        name = repr(owner)
        if kind is Hold.RETAIN:
            for part in wire.parts(keys):
                self._line.put(wire.UnholdBlocks(kind, name, part))
            return False
        is_known = name in self._pins
        self._pins.discard(name)
        self._line.put(wire.UnholdBlocks(kind, name, []))
        return is_known

    def demote(self, keys: Sequence[bytes]) -> None:
        if not self._off:
            self._stores.demote(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `CacheClient.remove`. The pool's blocks stay, which other engines use."""
        return 0

    # Steps.

    def poll(self) -> list[Ended]:
        """See `CacheClient.poll`. Sends the messages of the step."""
        if self._is_quiet:
            return []
        if self._recovering:
            self._recover()
        if self._reattachment.has_made:
            self._line.cut("it has ended or closed the connection")
        self._line.listen()
        while self._line.come:  # an error loses none of them
            self._hear(self._line.come[0])
            self._line.come.popleft()
        ended = self._device.poll(self._finish)
        if self._stores.by_id:
            self._end_published()
        self._stores.publish()
        if not self._line.is_cut and self._changes.compares(self._tiers.below):
            self._changes.compare(self._tiers.below)
        if self._stores.awaits_answer or self._tiers.awaits_news:
            self._line.await_answer()
        self._line.send()
        if self._line.is_cut:
            self._attach_again()
        if ended and not self._stopped and not all(each.done for each in ended):
            self._check_ranks()
        return ended

    @property
    def _is_quiet(self) -> bool:
        """Whether `poll` has nothing to do. Steps of an engine that waits for a fetch are many."""
        line, stores = self._line, self._stores
        if stores.by_id or self._device.unreported or line.busy or line.has_news or line.is_cut:
            return False
        if self._recovering or self._reattachment.has_made:
            return False
        return not self._changes.compares(self._tiers.below)

    def _end_published(self) -> None:
        """End and count the stores that the service has published."""
        count = None if self._line.is_cut else self._stores.drain_published()
        if count is not None:
            self._line.note_answer()
            self.counters.stored_blocks += count
            self.counters.stored_bytes += count * self._block_bytes

    def _attach_again(self) -> None:
        """The service is gone, or serves this engine no more, until there is a new connection."""
        if not self._is_alone:
            self._line.come.clear()
            self._tiers.lose()
            self._pins.clear()
            self._changes.lose()
            self._stores.lose_told()
            self._is_alone = True
            logger.error(
                "the service of FlexKV is gone: %s; until it is back, blocks in host memory are "
                "loaded as before, and nothing is stored or fetched",
                self._line.reason,
            )
        with ExitStack() as undo:
            undo.callback(self._reattachment.reject)
            made = self._reattachment.take()
            if made is None:
                return
            connection, attachment = made
            self._is_alone = False
            self._line.resume(connection)
            self._tiers.below = attachment.below
            self._tiers.announced = attachment.announced
            self.info = replace(self.info, takes_tenants=self._takes_tenants(attachment.has_shares))
            self._stores.claim()
            self._changes.resume()
            self._line.send()
            logger.info("attached to the service of FlexKV again")
            undo.pop_all()

    def _hear(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Granted():
                # The service may grant slots again of stores that it has published meanwhile.
                self._end_published()
                self._stores.grant(message.slots)
            case wire.Recall():
                self._stores.recall(message.count)
            case wire.Changed() | wire.Repeated():
                self._changes.hear(message)
            case wire.Answered():
                self._tiers.hear_answer(message)
            case wire.NodeFigures():
                self._node = message

    def _finish(self, copy: DeviceCopy[_Slots]) -> None:
        count = len(copy.blocks)
        if copy.transfer.direction is Direction.STORE:
            self._finish_store(copy, count)
            return
        if copy.done:
            self.counters.loaded_blocks += count
            self.counters.loaded_bytes += count * self._block_bytes
        else:
            self.counters.failed_loads += 1
            if self.counters.failed_loads == 1:
                logger.warning("a load of %d blocks failed (logged once)", count)
        self._holds.release(copy.blocks.slots)

    def _finish_store(self, copy: DeviceCopy[_Slots], count: int) -> None:
        number = copy.transfer.id
        if copy.done:
            self._stores.by_id[number].has_ended = True
            return
        self._stores.undo(self._stores.end(number))
        self.counters.failed_stores += 1
        if self.counters.failed_stores == 1:
            logger.warning("a store of %d blocks failed; not cached (logged once)", count)

    def _check_ranks(self) -> None:
        stopped = self._device.stopped_ranks
        if stopped:
            self._stop()
            log_stopped(stopped)

    # Resets and the end. They concern this engine alone: others of the pool keep its blocks.

    def reset(self, kind: Reset, cause: str = ResetCause.REQUEST) -> None:
        match kind:
            case Reset.SUSPEND:
                self._off = True
            case Reset.CLEAR | Reset.EMPTY | Reset.RENEW:
                self._off = True
                self._begin_anew()
                self.counters.count_reset(ResetCause(cause))
                self._off = self._stopped
            case Reset.PAUSE:
                self._stores.discard_all()
                self.counters.count_reset(ResetCause.PAUSE)
            case Reset.STOP:
                self._stop()
            case Reset.RECOVER:
                self._recovering = True
                self._changes.tear()

    def _stop(self) -> None:
        self._off = True
        if not self._stopped:
            self._begin_anew()
            self._stopped = True

    def sync(self) -> list[Future[str]]:
        return []

    def _begin_anew(self) -> None:
        """Publish no store that is under way, and end all fetches and pins."""
        self._stores.discard_all()
        self._tiers.end_all()
        self._stores.forget_demotions()
        for owner in self._pins:
            self._line.put(wire.UnholdBlocks(Hold.PIN, owner, []))
        self._pins.clear()

    def _recover(self) -> None:
        """Hold what the loads under way hold, and have the slots that no store has."""
        loads = self._device.rows_in_use(Direction.LOAD)
        self._holds.settle([slot for row in loads for slot in row.slots])
        self._stores.recover(self._device.under_way)
        self._tiers.end_all()  # some may be nobody's
        self._recovering = False

    def close(self, flush_seconds: float = 0.0) -> bool:
        try:
            self.poll()
        except Exception as error:  # noqa: BLE001 - the connection would never be closed
            logger.error("the last results of copies are lost while the cache closes: %r", error)
        self._reattachment.close()
        self._line.close()
        self._attached.close()
        return True

    # Changes, figures.

    def figures(self) -> Figures:
        host = HostFigures(
            self.counters,
            0,
            self.info.num_slots,
            self.info.slot_bytes,
            0,
            self._trouble,
            len(self._device.unreported),
            self.info.policy_name,
            NO_GUARD,
        )
        read = self._meter.read(host, ())
        return Figures(read.own, self._node.shared or read.shared, read.counts)
