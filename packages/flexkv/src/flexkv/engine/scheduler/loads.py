# SPDX-License-Identifier: Apache-2.0
"""Orders loads of requests' blocks, which workers copy: in one part, or as their blocks come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from flexkv.client import CacheClient, Ended, TransferEnd
from flexkv.engine.choice.cost import Span
from flexkv.engine.orders import CopyOrder, StepOrders
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.fetches import Fetches
from flexkv.engine.scheduler.groups import Group
from flexkv.engine.scheduler.request import NEVER, Match, TrackedRequest, Wanted
from flexkv.engine.scheduler.scheduled_step import Tables

_PARTS = 8
"""About the number of parts of a load that waits for a lower tier. Each part costs a place on the
board and a few microseconds. The device copies the last part after the disk has ended."""


@dataclass(slots=True)
class Loading:
    """A load that the engine was promised, and its progress.

    Attributes:
        parts: the groups of its blocks, each with the numbers of their blocks.
        first: as `Plan.start`.
        engine_blocks: the engine's blocks to fill, in order; the first may begin inside a FlexKV
            block.
        skip: engine blocks of the first FlexKV block that the engine has itself.
        step: engine blocks of a FlexKV block.
        start, stop: tokens of the request before and up to the end of the load.
        engine_block_tokens: tokens of one engine block; 0 if only the whole load is of use.
    """

    keys: Sequence[bytes]
    parts: Sequence[tuple[Group, range]]
    first: int
    engine_blocks: list[int]
    skip: int
    step: int
    start: int
    stop: int
    engine_block_tokens: int
    ordered: int = 0

    @property
    def wanted(self) -> Iterator[Wanted]:
        """Its blocks by group."""
        at = 0
        for group, blocks in self.parts:
            yield Wanted(group, blocks.start, self.keys[at : at + len(blocks)])
            at += len(blocks)

    @property
    def rest(self) -> list[int]:
        """The engine's blocks without an ordered copy."""
        return self.engine_blocks[self._place(self.ordered) :]

    @property
    def tokens_ordered(self) -> int:
        """Tokens of the request up to the end of the ordered blocks; the load's start if only the
        whole load is of use."""
        return self.start + self._place(self.ordered) * self.engine_block_tokens

    def next_part(self, cache: CacheClient, more_may_come: bool) -> CopyOrder | None:
        """Order blocks that are in host memory and not ordered yet; None if there are none or few.
        Once the order is given, the caller calls `advance`."""
        stop, transfer = len(self.keys), None
        if not more_may_come:
            transfer = cache.load(self.keys[self.ordered :])  # mostly all are there
        if transfer is None:
            there = cache.lookup(self.keys[self.ordered :])
            if there == 0 or (more_may_come and there < len(self.keys) // _PARTS):
                return None
            stop = self.ordered + there
            transfer = cache.load(self.keys[self.ordered : stop])
        if transfer is None:
            return None
        return CopyOrder(
            transfer.id,
            transfer.cell,
            self.engine_blocks[self._place(self.ordered) : self._place(stop)],
            transfer.slots,
            0 if self.ordered else self.skip,
            last=stop == len(self.keys),
        )

    def advance(self, order: CopyOrder) -> None:
        """Note that the order of `next_part` was given."""
        self.ordered += len(order.slots)

    def _place(self, block: int) -> int:
        """The place in `engine_blocks` at which a FlexKV block begins."""
        return max(0, block * self.step - self.skip)


@dataclass(slots=True)
class _Load:
    """A load that the engine was promised. If it `waits`, it computes the request only after the
    end of the load."""

    start: int
    waits: bool
    tables: Tables | None = None


class Promises:
    """Loads whose order has not been given as a whole.

    Workers report the end of each order. If the scheduler side fails before it has given one, the
    engine would wait for ever, or compute on blocks that nothing fills. Nothing here can fail,
    apart from `end_all`.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.loads: dict[str, _Load] = {}

    def matched(self, request_id: str, start: int, answer: tuple[int | None, bool]) -> None:
        """The engine gets this answer to its lookup for a request that has `start` tokens."""
        if answer[0]:
            self.loads[request_id] = _Load(start, answer[1])
        else:
            self.loads.pop(request_id, None)

    def allocated(self, request_id: str, tables: Tables, tokens: int) -> None:
        """The engine has allocated blocks, and expects the load of `tokens` tokens."""
        load = self.loads.get(request_id)
        if load is not None:
            if tokens:
                load.tables = tables
            else:
                del self.loads[request_id]

    def ended(self, request_id: str) -> None:
        """A request has ended. The engine holds its blocks until its load has ended, too."""
        load = self.loads.get(request_id)
        if load is not None and load.tables is None:
            del self.loads[request_id]

    def ordered(self, orders: StepOrders) -> None:
        """The engine passes these orders to the workers."""
        for request_id in list(self.loads):
            load, order = self.loads[request_id], orders.loads.get(request_id)
            is_complete = request_id in orders.failed_loads or (order and order.last)
            if load.tables is not None and (is_complete or not load.waits):
                del self.loads[request_id]

    def end_all(self, orders: StepOrders) -> None:
        """Add to `orders` what ends all of this: the loads fail. Later calls add nothing."""
        loads, self.loads = self.loads, {}
        for request_id, load in loads.items():
            if load.tables is None:
                continue  # the engine looks it up again
            first = load.start // self._group.engine_block_tokens
            blocks = list(load.tables[self._group.index][first:])
            if load.waits:
                orders.failed_loads[request_id] = blocks
            else:
                orders.unfilled.extend(blocks)


@dataclass(frozen=True, slots=True)
class _Running:
    """A transfer under way. The forward pass beside it reads or fills the engine's blocks
    `computed_on`."""

    tracked: TrackedRequest
    start: int
    blocks: int
    computed_on: Sequence[int] = ()
    begun: float = field(default_factory=time.monotonic)


class Loads:
    """The loads of one engine's requests, at most one for each.

    Blocks whose load failed are not offered to the same request again. Otherwise the request would
    retry them in every step.

    Attributes:
        held: transfers that hold the blocks of this step's hits whose load is not ordered, by
            request.
        running_requests: how many requests compute in the last step; the caller sets it.
        unfinished: loads of which `continue_all` may order further parts.
        half_loaded: the engine's hashes of the blocks that the step being scheduled computes on
            while they are loaded. The caller clears it once the step is scheduled.
    """

    def __init__(self, engine: EngineCache, fetches: Fetches) -> None:
        self._engine = engine
        self._cache = engine.cache
        self._groups = engine.groups
        self._keys = engine.keys
        self._boundary = engine.boundary
        self.fetches = fetches
        self._chooser = engine.chooser
        self._chooser.loading_now = self._loading_blocks
        self._spans = engine.spans
        self.unfinished: dict[TrackedRequest, Loading] = {}
        self._running: dict[int, _Running] = {}
        self.half_loaded: set[bytes] = set()
        self.held: dict[str, int] = {}
        self.promises = Promises(self._groups.members[0])
        self.running_requests = 0

    def hold(self, request_id: str, keys: Sequence[bytes]) -> bool:
        """Hold the blocks of a hit until `begin` or the end of the step. Without it, other engines
        of a shared cache may evict them. Returns False if one of them has left."""
        self._unhold(request_id)
        transfer = self._cache.load(keys)
        if transfer is None:
            return False
        self.held[request_id] = transfer.id
        return True

    def unhold_all(self) -> None:
        """The step is scheduled: what was not ordered is matched again."""
        while self.held:
            self._cache.end_transfer(self.held.popitem()[1], TransferEnd.CANCEL)

    def begin(self, tracked: TrackedRequest, tokens: int, orders: StepOrders) -> None:
        """Order the load of `tokens` tokens, as `Matcher.match` has returned them, as far as they
        are in host memory. The request has the engine's blocks to fill."""
        if tokens:
            self._begin(tracked, tracked.match or Match(0), tokens, orders)
        else:
            self.fetches.end(tracked)
        self._unhold(tracked.id)

    def _loading_blocks(self) -> int:
        """How many blocks are being loaded."""
        count = 0
        for running in self._running.values():
            count += running.blocks
        return count

    def _unhold(self, request_id: str) -> None:
        held = self.held.pop(request_id, None)
        if held is not None:
            self._cache.end_transfer(held, TransferEnd.CANCEL)

    def _begin(
        self, tracked: TrackedRequest, match: Match, tokens: int, orders: StepOrders
    ) -> None:
        local_tokens, layerwise = match.local_tokens, match.layerwise
        if tracked.match is None:
            self.fetches.end(tracked)
        loading = self._loading(tracked, match, tokens)
        if self._groups.plain and local_tokens == 0 and not tracked.options.pin:
            # Host memory has the blocks. If the load fails, all are offered to it again.
            loaded = tokens // self._groups.alignment * self._groups.alignment
            tracked.skip_fills(loaded)
        if not layerwise:
            self.unfinished[tracked] = loading
            self._order_part(tracked, loading, orders)
            return
        complete = self._cache.lookup(loading.keys) == len(loading.keys)
        order = loading.next_part(self._cache, more_may_come=False) if complete else None
        if order is None:
            self._refuse(tracked, loading.engine_blocks, match, orders)
            return
        tracked.built_on = order.transfer_id
        filled = self._blocks_from(tracked, local_tokens)
        self._running[order.transfer_id] = _Running(tracked, local_tokens, len(order.slots), filled)
        orders.layerwise.append(order)
        loading.advance(order)
        size = self._keys.hash_tokens
        hashes = tracked.request.block_hashes
        # Rounded up: the load of a whole prompt also fills the block whose last token is computed.
        stop = -(-(local_tokens + tokens) // size)
        self.half_loaded.update(hashes[local_tokens // size : stop])
        self.end(tracked)

    def shares_half_loaded(self, request: EngineRequest, local_tokens: int) -> bool:
        """Whether the engine found blocks for a request that another request of the step loads.

        The engine counts them as complete as soon as the other request has them. If the load fails,
        both requests continue, and the second may run before the first has computed the missing
        blocks.
        """
        known = request.block_hashes[: local_tokens // self._keys.hash_tokens]
        return not self.half_loaded.isdisjoint(known)

    def continue_all(self, orders: StepOrders) -> None:
        """Order the fetched blocks of loads that were not ordered as a whole."""
        for tracked, loading in list(self.unfinished.items()):
            if tracked.id in orders.loads:
                continue  # one part in a step
            with self._boundary.guard(
                "loading the rest of a prefix", "the load is reported as failed"
            ):
                self._order_part(tracked, loading, orders)
                continue
            self.fail_rest(tracked, orders)

    def refuse(
        self, tracked: TrackedRequest, table: Sequence[int], tokens: int, orders: StepOrders
    ) -> None:
        """Report the load of `tokens` tokens as failed, because `begin` has raised. `table`: the
        request's engine blocks of the first group."""
        match = tracked.match or Match(0)
        size = self._groups.members[0].engine_block_tokens
        stop = -(-(match.local_tokens + tokens) // size)
        self._refuse(tracked, list(table[match.local_tokens // size : stop]), match, orders)

    def _refuse(
        self, tracked: TrackedRequest, engine_blocks: list[int], match: Match, orders: StepOrders
    ) -> None:
        """Report the promised load of `engine_blocks` as failed."""
        tracked.fail_from(match.local_tokens)
        if match.layerwise:
            # The step computes on these blocks anyway, and the engine discards the result.
            orders.unfilled.extend(engine_blocks)
            tracked.next_fill = NEVER
            self._disown(self._blocks_from(tracked, match.local_tokens))
        else:
            orders.failed_loads[tracked.id] = engine_blocks
        self.end(tracked)

    def ended(self, transfer: Ended) -> None:
        """A transfer has ended; if it is no load, nothing happens."""
        running = self._running.get(transfer.id)
        if running is None:
            return
        tracked = running.tracked
        if transfer.done:
            if tracked.built_on == transfer.id:
                tracked.built_on = 0
        else:
            tracked.fail_from(running.start)
            if tracked.built_on == transfer.id:
                tracked.next_fill = NEVER
            self._disown(running.computed_on)
        del self._running[transfer.id]
        if self._spans is not None:
            blocks = {"blocks": running.blocks, "done": transfer.done}
            self._spans.add(tracked.request, "load", running.begun, blocks)

    @property
    def running(self) -> Iterable[int]:
        """Ids of the transfers that have not ended."""
        return self._running

    def abandon(self, tracked: TrackedRequest, orders: StepOrders) -> None:
        """The request has ended. Its ordered loads end before the engine reuses its blocks."""
        if tracked in self.unfinished:
            orders.failed_loads[tracked.id] = []
        self.end(tracked)

    def fail_rest(self, tracked: TrackedRequest, orders: StepOrders) -> None:
        """Report the rest of a request's load as failed, if it was not ordered as a whole."""
        loading = self.unfinished.get(tracked)
        if loading is not None:
            orders.failed_loads[tracked.id] = loading.rest
            tracked.fail_from(loading.tokens_ordered)
            self.end(tracked)

    def end(self, tracked: TrackedRequest) -> None:
        """Order no more loads for the request."""
        self.unfinished.pop(tracked, None)
        self.fetches.end(tracked)

    def _blocks_from(self, tracked: TrackedRequest, local_tokens: int) -> list[int]:
        """The engine's blocks of a request behind its own hit."""
        start = local_tokens // self._groups.members[0].engine_block_tokens
        return tracked.engine_blocks[0][start:]

    def _disown(self, engine_blocks: Sequence[int]) -> None:
        """Remove blocks that a forward pass read or filled without its load from the engine's
        prefix cache.

        An engine that recomputes keeps them there for the request to fill. A request that is
        aborted meanwhile never fills them.
        """
        if self._engine.pool is not None and engine_blocks:
            self._engine.pool.forget(set(engine_blocks))

    def _loading(self, tracked: TrackedRequest, match: Match, tokens: int) -> Loading:
        """The blocks to copy. The engine's first may be inside a FlexKV block, in a model of plain
        attention."""
        local_tokens, end, count = match.local_tokens, match.local_tokens + tokens, 0
        parts: list[tuple[Group, range]] = []
        engine_blocks: list[int] = []
        skip = 0
        for group, table in zip(self._groups.members, tracked.engine_blocks, strict=True):
            size, step = group.engine_block_tokens, group.engine_blocks
            start = max(local_tokens // size, group.first_needed(end) * step)
            stop = -(-end // size)
            blocks = range(start // step, -(-stop // step))
            skip = start - blocks.start * step
            count += len(blocks)
            parts.append((group, blocks))
            engine_blocks += table[start:stop]
        keys = match.keys[:count]
        if len(keys) < count or not (self._groups.plain or len(match.keys) == count):
            made = (self._keys.of(tracked, group, its.start, its.stop) for group, its in parts)
            keys = list(chain.from_iterable(made))
        if self._groups.plain:
            start = local_tokens // size * size
            return Loading(keys, parts, blocks.start, engine_blocks, skip, step, start, end, size)
        if 0 in engine_blocks or len(keys) != len(engine_blocks):
            raise ValueError(
                f"the engine has no place for blocks of {tracked.request.request_id}, which should "
                f"be loaded from token {local_tokens} to {end}: {tracked.engine_blocks}"
            )
        return Loading(keys, parts, local_tokens, engine_blocks, 0, 1, local_tokens, end, 0)

    def _order_part(self, tracked: TrackedRequest, loading: Loading, orders: StepOrders) -> None:
        more_may_come = self.fetches.is_waiting(tracked)
        start = loading.tokens_ordered
        order = loading.next_part(self._cache, more_may_come)
        if order is not None:
            self._running[order.transfer_id] = _Running(tracked, start, len(order.slots))
            orders.loads[tracked.id] = order
            loading.advance(order)
            if order.last:
                self.end(tracked)
                return
        if not more_may_come and not self._goes_on(tracked, loading) and order is None:
            self.fail_rest(tracked, orders)

    def _goes_on(self, tracked: TrackedRequest, loading: Loading) -> bool:
        """Whether further blocks of a load come, now that all that had come are ordered."""
        if tracked.failed_at <= loading.tokens_ordered:
            return False  # a part has failed, and the engine computes what follows it
        slots = self.next_slots(tracked, loading)
        if slots == 0:
            # The ends of copies free slots. Requests that wait for a step may keep all others.
            comes = any(self.fetches.is_waiting(each) for each in self.unfinished)
            return comes or bool(self._cache.status.under_way)
        return slots is not None

    def next_slots(self, tracked: TrackedRequest, loading: Loading) -> int | None:
        """Fetch the blocks of a load that are not ordered: host memory had no room for them before.
        Returns how many of them have got a slot, from the first on; None if they cannot come, or if
        waiting for them is not worthwhile."""
        keys, first = loading.keys[loading.ordered :], loading.first + loading.ordered
        if self._cache.lookup(keys[:1]):
            return 1  # another engine has fetched it meanwhile
        fetch, others = self.fetches.fetch_next(tracked, keys, first), self.running_requests
        span = Span(loading.tokens_ordered, loading.stop)
        if fetch is None or not self._chooser.is_worth_waiting(fetch, span, others, whole=True):
            return None
        slots = self._cache.fetch_state(fetch).stop
        if slots:
            self.fetches.describe(tracked, loading.wanted)
        return slots
