# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request are stored, and when."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from flexkv.client import Ended, Hold, Transfer, TransferEnd
from flexkv.engine.orders import CopyOrder, StepOrders
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.full_blocks import Filled, full_blocks
from flexkv.engine.scheduler.groups import Group, Reach
from flexkv.engine.scheduler.options import (
    RequestOptions,
    pin_owner,
    tenant_number_of,
    tenant_of,
)
from flexkv.engine.scheduler.request import NEVER, TrackedRequest
from flexkv.engine.scheduler.scheduled_step import ScheduledStep
from flexkv.types.tenants import NO_TENANT


class _Run(NamedTuple):
    """FlexKV blocks of a request that can be stored, one behind the other, from a position on, and
    the engine's blocks of all."""

    request: EngineRequest
    group: Group
    position: int
    blocks: int
    engine_blocks: Sequence[int]

    def block(self, i: int) -> _Run:
        """Its block `i`."""
        step = self.group.engine_blocks
        blocks = self.engine_blocks[i * step : (i + 1) * step]
        return _Run(self.request, self.group, self.position + i, 1, blocks)


class _Pin(NamedTuple):
    """Blocks to pin or to retain once they have slots."""

    keys: Sequence[bytes]
    request: EngineRequest
    options: RequestOptions


_GROUP_OF = attrgetter("group.index")


@dataclass(slots=True)
class _Chains:
    """Blocks of several requests that one transfer stores.

    Attributes:
        keys: each key follows the key of the block that it builds on.
        prefix_starts: places in `keys` of blocks that build on none.
        runs: the blocks to store, each run with the place of its first key in `keys`, ascending.
            Its keys are in `keys` already: an error while a request is added leaves none without.
        tenants: for each of the keys its tenant; empty if the cache does not want to know. An
            error may leave keys without runs, whose tenants are missing or those that follow.
    """

    keys: list[bytes] = field(default_factory=list)
    prefix_starts: set[int] = field(default_factory=set)
    runs: list[tuple[_Run, int]] = field(default_factory=list)
    pins: list[_Pin] = field(default_factory=list)
    tenants: list[int] = field(default_factory=list)


StoreBatch = dict[int, _Chains]
"""The stores of one step, by the layer-wise load that their blocks were computed on; 0 if none.
Each is one transfer, because a transfer costs more than its blocks."""

UNREPORTED_STEPS = 64
"""Steps after which a step without a report counts as ended. An engine has few steps under way; the
report is missing only after an error."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A store under way, which outlives its requests.

    Attributes:
        runs: the sources of its blocks, in their order.
        step: number of the step whose end proves them.
    """

    transfer: Transfer
    runs: Sequence[_Run]
    engine_blocks: AbstractSet[int]
    step: int
    begun: float = field(default_factory=time.monotonic)

    def positions_by_run(self) -> Iterator[tuple[_Run, range]]:
        """The positions of each run's blocks in the transfer."""
        stop = 0
        for run in self.runs:
            start, stop = stop, stop + run.blocks
            yield run, range(start, stop)


class Stores:
    """The stores of one engine's requests.

    The engine may give the blocks that a store reads to another request before the store has ended:
    their request ended, was preempted, or has moved its window past them. Workers then wait for the
    store before they write to these blocks: the store is fenced.

    The engine counts tokens as computed once it has scheduled them. Whether they are is known when
    the step has ended: a load that the step computed on may have failed, another connector's too.
    Until then the step's stores are held, and their blocks are not found.

    Full attention stores every block. Groups that look back less far store only blocks that a later
    request can use: those needed to continue at the end of the prompt, and where another request's
    prompt diverged. All blocks of an answer are stored, because its length is not known in advance.
    All blocks are also stored in a model without full attention, since no other group shows where
    prompts diverge.
    """

    def __init__(self, engine: EngineCache) -> None:
        groups = engine.groups
        self._cache = engine.cache
        self._groups = groups
        self._keys = engine.keys
        self._boundary = engine.boundary
        self._describe = engine.describe
        self._spans = engine.spans
        self._align = groups.alignment
        self._calendar = full_blocks(groups)
        # Those of full attention first, since the others build on them; with their tables' places.
        places = enumerate(groups.members)
        self._by_reach = sorted(places, key=lambda each: each[1].reach is not Reach.ALL)
        self._keeps_windows = all(group.reach is not Reach.ALL for group in groups.members)
        self.under_way: dict[int, _Running] = {}
        self._step = 0
        self._held: deque[_Running] = deque()
        # Requests that began in a step that has not ended: loads of that step fill their blocks.
        self._begun: deque[tuple[int, Sequence[Sequence[int]]]] = deque()

    def first_fill(self, options: RequestOptions) -> int:
        """`next_fill` of a request whose blocks were not considered yet."""
        return self._align if options.store or _keeps(options) else NEVER

    def scheduled(self, tracked: TrackedRequest) -> None:
        """The step that is being scheduled is the first to run a request with its blocks."""
        self._begun.append((self._step + 1, tracked.engine_blocks))
        self._calendar.watch(tracked, 1)

    def order_filled(
        self, step: ScheduledStep, requests: Mapping[str, TrackedRequest], orders: StepOrders
    ) -> bool:
        """Order stores of the blocks that a step fills. Returns whether it fills any to store."""
        batch: StoreBatch = {}
        consequence = "those of this step are not cached"
        with self._boundary.guard("finding full blocks", consequence, loses=False):
            size, several = self._keys.hash_tokens, step.total_tokens > len(step.tokens)
            filled = self._calendar.take(step.tokens, requests, size, several)
            if filled:
                self._add_filled(filled, batch)
        if not self._groups.plain:
            for request_id, offers in step.states.items():
                if request_id in requests:
                    self._add_states(requests[request_id], offers, batch)
        if not batch:
            return False
        self._order(batch, orders)
        return True

    def ended(self, transfer: Ended) -> None:
        """A transfer has ended; if it is no store, nothing happens."""
        running = self.under_way.pop(transfer.id, None)
        if self._spans is None or running is None:
            return
        requests = {run.request.request_id: run.request for run in running.runs}
        stored: Counter[str] = Counter()
        for run in running.runs:
            stored[run.request.request_id] += run.blocks
        for request_id, blocks in stored.items():
            attributes = {"blocks": blocks, "done": transfer.done}
            self._spans.add(requests[request_id], "store", running.begun, attributes)

    def step_is_complete(self) -> int:
        """The engine has scheduled a step, with all stores that were ordered since the last one.
        Returns the number of the step if its end must be reported, else 0."""
        self._step += 1
        if self._held or self._begun:
            self.step_ended(self._step - UNREPORTED_STEPS)
        return self._step if self._held and self._held[-1].step == self._step else 0

    def step_ended(self, number: int) -> None:
        """The steps up to `number` have ended, after `distrust`: their stores count."""
        while self._held and self._held[0].step <= number:
            # In this order: after an error the next call confirms it.
            self._cache.end_transfer(self._held[0].transfer.id, TransferEnd.CONFIRM)
            self._held.popleft()
        while self._begun and self._begun[0][0] <= number:
            self._begun.popleft()

    def distrust(self, invalid: AbstractSet[int], requests: Iterable[TrackedRequest]) -> set[int]:
        """Discard all that was stored of wrong blocks, and store nothing more of them. Loads of the
        step that ended last, anyone's, should have filled the engine's blocks `invalid` but did
        not. Returns these, and those that were computed behind them."""
        wrong = self._discard_wrong(invalid)
        first = self._groups.members[0]
        for tracked in requests:
            places = [first_of(wrong, table) for table in tracked.engine_blocks]
            if places == list(map(len, tracked.engine_blocks)):
                continue
            good = places[0] * first.engine_block_tokens
            if self._groups.plain and tracked.request.num_computed_tokens <= good:
                # The engine computes them again. Blocks that have a slot are not stored twice.
                tracked.fill_again(self.first_fill(tracked.options))
                self._calendar.watch(tracked, 1)
            else:
                tracked.store_nothing()
        return wrong

    def _discard_wrong(self, invalid: AbstractSet[int]) -> set[int]:
        wrong = set(invalid)
        for _, tables in self._begun:
            for table in tables:
                wrong.update(table[first_of(invalid, table) :])
        for running in self._held:
            if running.engine_blocks.isdisjoint(wrong):
                continue
            discarded = [
                position
                for run, positions in running.positions_by_run()
                for i, position in enumerate(positions)
                if not wrong.isdisjoint(run.block(i).engine_blocks)
            ]
            self._cache.end_transfer(running.transfer.id, TransferEnd.DISCARD, discarded)
        return wrong

    def fence(self, engine_blocks: Iterable[int], orders: StepOrders) -> None:
        """The engine writes to these blocks from this step on: workers first wait for the stores
        that read them."""
        written = set(engine_blocks)
        orders.fences.extend(
            transfer_id
            for transfer_id, running in self.under_way.items()
            if not running.engine_blocks.isdisjoint(written)
        )

    def fence_all(self, orders: StepOrders) -> None:
        """The engine may write to any block from this step on: fence all stores."""
        orders.fences.extend(self.under_way)

    def discard(self, engine_blocks: Iterable[int]) -> None:
        """These blocks are overwritten before workers can wait for the stores that read them: the
        stores are discarded."""
        written = set(engine_blocks)
        for running in self.under_way.values():
            if running.engine_blocks.isdisjoint(written):
                continue
            torn = {
                run.request.request_id
                for run in running.runs
                if not written.isdisjoint(run.engine_blocks)
            }
            by_run = running.positions_by_run()
            whole = (where for run, where in by_run if run.request.request_id in torn)
            self._cache.end_transfer(
                running.transfer.id, TransferEnd.DISCARD, list(chain.from_iterable(whole))
            )

    def _add_filled(self, filled: Iterable[Filled], batch: StoreBatch) -> None:
        """Add blocks that are full to the batch of the step."""
        rest = iter(filled)
        while True:
            # After an error with one request, those behind it follow.
            with self._boundary.guard("storing blocks", "they are not cached", loses=False):
                for tracked, start, stop in rest:
                    most = tracked.options.max_store_tokens
                    if most is not None and most <= start:
                        tracked.store_nothing()
                        continue
                    end = stop if most is None else min(stop, most)
                    self._add(tracked, self._filled_between(tracked, start, end), batch)
                return

    def _add_states(
        self,
        tracked: TrackedRequest,
        offers: Iterable[tuple[int, int, int]],
        batch: StoreBatch,
    ) -> None:
        """Add recurrent states. `offers`, by the engine: the index of a group, the block with a
        state after this step, and the number of tokens behind which it is the state."""
        if tracked.next_fill == NEVER:
            return
        with self._boundary.guard("storing states", "they are not cached", loses=False):
            self._add(tracked, self._states_of(tracked, offers), batch)

    def _order(self, batch: StoreBatch, orders: StepOrders) -> None:
        for built_on, chains in batch.items():
            with self._boundary.guard("ordering stores", "the blocks of the step are not cached"):
                self._begin(chains, built_on, orders)

    def _states_of(
        self, tracked: TrackedRequest, offers: Iterable[tuple[int, int, int]]
    ) -> list[_Run]:
        """The states that the engine offers, of prefixes that a load may end with."""
        request, most = tracked.request, tracked.options.limit_stored(NEVER)
        members = {group.index: group for group in self._groups.members}
        found: list[_Run] = []
        for index, block, tokens in offers:
            group = members.get(index)
            if group is not None and block and tokens % self._align == 0 and tokens <= most:
                position = tokens // group.block_tokens - 1
                found.append(_Run(request, group, position, 1, (block,)))
        return sorted(found, key=lambda run: (run.group.index, run.position))

    def _filled_between(self, tracked: TrackedRequest, start: int, stop: int) -> list[_Run]:
        """Blocks that were filled between `start` and `stop` tokens and are stored now.

        Blocks that the engine no longer has are left out. So are blocks that it may have given to
        other requests in this step: an earlier step filled them, and the window has passed them.
        """
        request = tracked.request
        found: list[_Run] = []
        tables = tracked.engine_blocks
        for place, group in self._by_reach:
            reach, size, step = group.reach, group.block_tokens, group.engine_blocks
            table = tables[place]
            if reach is Reach.STATE:
                continue
            first, end = start // size, stop // size
            if reach is not Reach.ALL:
                first = max(first, group.first_needed(request.num_computed_tokens))
            blocks = table[first * step : end * step]
            all_wanted = reach is Reach.ALL or self._keeps_windows
            if all_wanted and 0 not in blocks:
                if first < end:
                    found.append(_Run(request, group, first, end - first, blocks))
                continue
            filled = range(first, end)
            for position in filled if all_wanted else self._wanted(tracked, group, filled):
                blocks = table[position * step : (position + 1) * step]
                if 0 not in blocks:
                    found.append(_Run(request, group, position, 1, blocks))
        return found

    def _wanted(self, tracked: TrackedRequest, group: Group, positions: range) -> list[int]:
        """The blocks that a later request can use, of a group that looks back less far."""
        prompt = tracked.options.limit_stored(tracked.request.num_prompt_tokens)
        align, size = self._align, group.block_tokens
        divergence = 0 if tracked.match is None else tracked.match.divergence
        ends = {each // align * align for each in (prompt, prompt - 1, divergence)}
        wanted = {
            position
            for end in ends
            for position in range(group.first_needed(end), end // size)
            if position in positions
        }
        answer = range(prompt // align * align // size, positions.stop)
        return sorted(wanted.union(range(max(answer.start, positions.start), answer.stop)))

    def _add(self, tracked: TrackedRequest, runs: Sequence[_Run], batch: StoreBatch) -> None:
        """Add blocks of a request, group by group ascending by position, each behind the one that
        it builds on.

        A block of a group that looks back less far is worth nothing without the last block of full
        attention. It does not need earlier blocks of its own group that no hit needs.
        """
        if not runs:
            return
        request, options = tracked.request, tracked.options
        chains = batch.get(tracked.built_on)
        if chains is None:
            chains = batch[tracked.built_on] = _Chains()
        keys, begin = chains.keys, len(chains.keys)
        stored: list[bytes] = []
        for _, same in groupby(runs, _GROUP_OF):
            own_runs = list(same)
            group, first, last = own_runs[0].group, own_runs[0].position, own_runs[-1]
            start = max(0, first - 1)
            own = self._keys.of(tracked, group, start, last.position + last.blocks)
            if group.reach is Reach.ALL and start < first:
                keys.append(own[0])
            elif len(keys) == begin:
                chains.prefix_starts.add(begin)
            for run in own_runs:
                at, place = run.position - start, len(keys)
                keys += own[at : at + run.blocks]
                if options.store:
                    chains.runs.append((run, place))
                if _keeps(options):
                    stored += own[at : at + run.blocks]
        if stored:
            chains.pins.append(_Pin(stored, request, options))
        if self._cache.info.takes_tenants:
            chains.tenants += [tenant_number_of(request)] * (len(keys) - len(chains.tenants))

    def _begin(self, chains: _Chains, built_on: int, orders: StepOrders) -> None:
        places = list(chain.from_iterable(range(at, at + run.blocks) for run, at in chains.runs))
        rest = [NO_TENANT] * (len(chains.keys) - len(chains.tenants))
        transfer = self._cache.store(
            chains.keys,
            places,
            chains.prefix_starts,
            held=True,
            tenants=chains.tenants + rest if chains.tenants else None,
        )
        if transfer is not None:
            try:
                if len(transfer.slots) == len(places):
                    stored = [run for run, _ in chains.runs]
                else:
                    stored = list(_with_slots(chains, transfer.keys))
                engine_blocks = list(chain.from_iterable(run.engine_blocks for run in stored))
                order = CopyOrder(
                    transfer.id, transfer.cell, engine_blocks, transfer.slots, built_on=built_on
                )
                blocks = frozenset(engine_blocks)
                running = _Running(transfer, stored, blocks, self._step + 1)
                self.under_way[transfer.id] = running
                self._held.append(running)
                orders.stores.append(order)
            except BaseException:
                self._cache.end_transfer(transfer.id, TransferEnd.CANCEL)
                raise
            self._describe_stored(running)
        for keys, request, options in chains.pins:
            if options.pin:
                self._cache.hold(Hold.PIN, keys, pin_owner(request, options), options.pin_seconds)
            if options.retain_seconds is not None:
                self._cache.hold(Hold.RETAIN, keys, tenant_of(request), options.retain_seconds)

    def _describe_stored(self, running: _Running) -> None:
        if self._describe is not None:
            keys = running.transfer.keys
            for run, positions in running.positions_by_run():
                found = ((run.position + i, keys[at]) for i, at in enumerate(positions))
                self._describe(run.request, run.group, found)


def _keeps(options: RequestOptions) -> bool:
    """Whether blocks of the request are pinned or retained."""
    return options.pin or options.retain_seconds is not None


def first_of(blocks: AbstractSet[int], table: Sequence[int]) -> int:
    """The place in `table` of the first of `blocks`; its length if it has none of them."""
    return next((i for i, block in enumerate(table) if block in blocks), len(table))


def _with_slots(chains: _Chains, stored: Iterable[bytes]) -> Iterator[_Run]:
    """The sources of the blocks of `chains` that got a slot, block by block; `stored` are the keys
    of these blocks."""
    granted = iter(stored)
    key = next(granted, None)
    for run, place in chains.runs:
        for i in range(run.blocks):
            if chains.keys[place + i] == key:
                yield run.block(i)
                key = next(granted, None)
