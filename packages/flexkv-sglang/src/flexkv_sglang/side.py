# SPDX-License-Identifier: Apache-2.0
"""The work of one rank for SGLang: it looks prefixes up, loads and stores. It imports nothing of
SGLang.

SGLang runs one scheduler beside each rank, and all make the same calls. Rank 0 has the cache and
decides. It sends each decision to the others within the same call, so that all ranks act alike.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile

from flexkv.client import CacheClient, Reset, TransferEnd
from flexkv.engine.boundary import ErrorBoundary, in_turns
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.engine.orders import CopyOrder, StepOrders
from flexkv.engine.recorder import Recorder
from flexkv.engine.worker.worker import WorkerSide
from flexkv.figures.definitions import Samples, add
from flexkv_sglang.copies import (
    Behind,
    Made,
    Offload,
    OrderedTransfers,
    Origin,
    QueuedLoad,
)
from flexkv_sglang.delayed_offloads import DelayedOffloads
from flexkv_sglang.events import TierEvents
from flexkv_sglang.keys import PageKeys
from flexkv_sglang.ranks import Exchanges, Ranks
from flexkv_sglang.requests import SglangRequests
from flexkv_sglang.trailing import NO_LAST, TrailingPages

_NO_BATCH = -1
"""SGLang's number for a batch that waits for no load."""

_UNDER_WAY, _FAILED, _STORED = range(3)
"""States of an offload, as the first stage of a pipeline passes them on."""

_PASSED_ON = 256
"""The most offloads whose ends are passed on in a step."""

_POLLING = "polling copies"
"""If errors last here, the rank ends all copies for good: SGLang keeps the pages of an offload
until a poll finds its end."""


@in_turns
class RankSide:
    """All that SGLang calls on one rank. Single-threaded, but for operators; see `in_turns`.

    Args:
        worker: copies this rank's shard.
        cache: of the engine, on rank 0; None on the others.
        may_wait: whether a request may have to wait for a lower tier; the same on all ranks.
        trailing: the pages of which a hit needs the last; the same on all ranks.
        recorder, options: see `SglangRequests`.

    Attributes:
        staged: the loads of a pipeline; None if the engine has one stage.
        events: of what tiers have; None until `watch`, and on ranks other than 0.
        weights_return: whether SGLang keeps a copy of weights whose memory it releases.
        delays: whether offloads should wait until SGLang is about to evict the pages, since they
            evict and nothing below host memory wants each block; the same on all ranks.
        delayed: the offloads that wait.
    """

    def __init__(
        self,
        worker: WorkerSide,
        ranks: Ranks,
        cache: CacheClient | None,
        *,
        page_size: int,
        chooser: LoadChooser,
        may_wait: bool,
        trailing: TrailingPages,
        boundary: ErrorBoundary,
        recorder: Recorder | None,
        options: Collection[str] | None,
    ) -> None:
        self.may_wait = may_wait
        self.staged = ranks.loads
        self.weights_return = self.delays = False
        self.events: TierEvents | None = None
        self.page_keys = PageKeys()
        self.keys_of = self.page_keys.of
        self._worker = worker
        self._exchanges = Exchanges(ranks, boundary)
        self.delayed = DelayedOffloads(self._exchanges)
        self._cache = cache
        self.trailing = trailing
        self._chooser = chooser
        self.boundary = boundary
        self._origin = Origin()
        self._closed = self._batch_failed = False
        self._step = 0
        self._queued: dict[str, QueuedLoad] = {}
        self._pending: deque[Offload] = deque()
        self._passed_on: deque[int] = deque()
        self._free_to_go: set[str] = set()
        self._batch = self._ended_batch = _NO_BATCH
        self._ordered: OrderedTransfers | None = None
        self.requests: SglangRequests | None = None
        if cache is not None:
            self.requests = SglangRequests(
                cache,
                chooser,
                page_size=page_size,
                page_keys=self.page_keys,
                boundary=boundary,
                recorder=recorder,
                options=options,
                trailing=trailing,
            )
            self._ordered = OrderedTransfers(cache, self.requests.traced.ended)
            boundary.after_error = self._ordered.lose

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._cache is not None

    @property
    def is_loading(self) -> bool:
        """Whether a load is queued or under way; the same on all ranks."""
        return bool(self._queued) or self._batch != self._ended_batch

    @property
    def may_change(self) -> bool:
        """Whether an operator may change the cache now, with the turn held. SGLang computes what a
        load no longer finds."""
        return not (self._closed or self._gave_up)

    @property
    def _gave_up(self) -> bool:
        return _POLLING in self.boundary.given_up

    def watch(self) -> None:
        """Make `events`, on the rank that decides."""
        if self._cache is not None:
            self.events = TierEvents(self._cache, self.page_keys.epoch.end)

    # Requests that SGLang is about to schedule.

    def lookup(self, rid: str, hashes: Sequence[str]) -> list[int]:
        """The length, in pages, of the longest prefix that can be loaded of the pages that SGLang
        lacks; nothing if none can, and on ranks that do not decide. SGLang, which allows several
        lengths, walks through all of them in Python: a prompt may have tens of thousands.
        """
        if self.requests is None:
            return []
        with self.boundary.guard("lookup", "it is a miss", loses=False):
            length = self.requests.lookup(rid, hashes)
            return [length] if length else []
        return []

    def agree_on_length(self, lengths: Sequence[int]) -> int:
        """The length of a prefix that all ranks load: that of the rank that decides."""
        (length,) = self._exchanges.decide(
            "lookup", "it is a miss", lambda: [max(lengths, default=0)], 1
        )
        return length

    def load(
        self,
        rid: str,
        hashes: Sequence[str],
        pages: Sequence[int] | None,
        last: Mapping[str, int] = NO_LAST,
    ) -> bool:
        """Queue a load for the next batch. All ranks return the same. Returns False if the blocks
        have left host memory since the lookup, or a rank of the first stage has no `pages`. On a
        rank of a later stage that has none, the load fails.

        Args:
            pages: numbers of the blocks that SGLang has allocated for the pages of `hashes`: its
                numbers of pages, then those of `TrailingPages.blocks_of`; None after an error.
            last: how many of the last pages have one in pools apart, by the pool's name.
        """
        trailing, count, named = self.trailing, len(hashes), False
        with self.boundary.guard("checking the pages of a load", "it is a miss", loses=False):
            is_hit = last == trailing.of_hit(count)
            named = is_hit and pages is not None and len(pages) == count + trailing.count(last)
        if not self._exchanges.ranks.all(named):
            return False

        def lease(cache: CacheClient) -> Made:
            keys = self.keys_of(hashes)
            transfer = cache.load([*keys, *trailing.keys_of(keys, last)] if last else keys)
            return None if transfer is None else (transfer, transfer.slots)

        number, cell, slots = self._decide("ordering a load", "it is a miss", lease)
        if not number:
            return False
        order = CopyOrder(number, cell, list(pages or ()), slots)
        queued = self._queued[rid] = QueuedLoad(order, fails=not named)
        with self.boundary.guard("counting a hit", "it is not counted"):
            if self.requests is not None:
                queued.fetched_tokens = self.requests.loads(rid, hashes, self._batch + 1, number)
        return True

    def fetched_tokens(self, rid: str) -> int:
        """Tokens of a queued load that lower tiers gave; 0 on ranks that do not decide."""
        queued = self._queued.get(rid)
        return 0 if queued is None else queued.fetched_tokens

    def cancel(self, rid: str) -> bool:
        """Drop a queued load. Returns False if the request has none."""
        queued = self._queued.pop(rid, None)
        if queued is not None and self._ordered is not None:
            self._ordered.offloads.pop(queued.order.transfer_id, None)
        with self.boundary.guard("cancelling a load", "the next poll cancels it"):
            if self._cache is not None and queued is not None:
                self._cache.end_transfer(queued.order.transfer_id, TransferEnd.CANCEL)
            if self.requests is not None:
                transfer_id = None if queued is None else queued.order.transfer_id
                self.requests.cancelled(rid, transfer_id)
        return queued is not None

    def held(self, rids: Sequence[str]) -> list[bool]:
        """Which of the waiting requests SGLang must not schedule yet; see `WaitingRequests.held`.
        All ranks return the same."""
        place, consequence = "waiting for a disk", "what has come is all"
        may_change = self.may_wait or self.is_loading or not self._free_to_go.issuperset(rids)
        if rids and may_change:
            made = partial(self._held, rids)
            held = self._exchanges.decide(place, consequence, made, len(rids))
            self._free_to_go = set() if any(held) else set(rids)
            return [*map(bool, held)]
        # Without an exchange, as often as an idle or a full engine looks for requests.
        if not rids and self.leads:
            with self.boundary.guard(place, consequence):
                self._held(rids)
        return [False] * len(rids)

    # The batch that needs them.

    def batch_begins(self, spans: Sequence[Span]) -> None:
        """Note that SGLang computes these parts of prompts next. The step counts as ended at the
        next call of `ended_offloads`; the caller ensures that it has ended by then."""
        self._chooser.timer.ended(0)
        self._step = self._chooser.step_begins(spans)

    def start_batch(self, behind: Behind = contextlib.nullcontext) -> int:
        """Begin all queued loads. Returns the number of the batch, or -1 if nothing is queued."""
        if not self._queued:
            return _NO_BATCH
        self._batch += 1
        queued, self._queued = self._queued, {}
        with self.boundary.guard("starting loads", "they count as failed"):
            orders = StepOrders(layerwise=[each.order for each in queued.values()])
            if not any(each.fails for each in queued.values()):
                with behind():
                    self._worker.start_loads(orders)
                return self._batch
        self._batch_failed = True
        with self.boundary.guard("failing loads", "their blocks stay in host memory"):
            self._worker.fail_loads(StepOrders(layerwise=[each.order for each in queued.values()]))
        return self._batch

    def wait_for_layer(self, layer: int) -> None:
        """Make the forward pass wait until the loads of a layer have ended. After an error, the
        forward pass computes on unknown bytes, and `finish_batch` reports a failure."""
        with self.boundary.guard("waiting for a layer", "the loads of the batch count as failed"):
            self._worker.wait_for_layer(str(layer))
            return
        self._batch_failed = True

    def finish_batch(self) -> bool:
        """Wait until no load writes to pages of the batch. Returns whether all loads succeeded."""
        batch_failed, self._batch_failed = self._batch_failed, False
        if self.staged is None:
            self.loads_known(self._batch)
        with self.boundary.guard("ending loads", "copies end, now and for good"):
            orders = StepOrders(has_forward=True)
            self._worker.finished(orders)
            failed = self._worker.take_bad_blocks()
            self._note_loads(orders)
            return not (batch_failed or failed)
        # Not guarded: if the copies do not end, they write to pages that SGLang gives to others.
        self._worker.poll_later(StepOrders(has_forward=True))
        self._worker.take_bad_blocks()
        return False

    def loads_known(self, batch: int) -> None:
        """The loads of a batch, and of earlier ones, have all succeeded or failed."""
        self._ended_batch = batch

    # Pages that SGLang has computed.

    def comes_from(self, origin: Origin) -> None:
        """Say where the pages of the next offload come from."""
        self._origin = origin

    def offload(
        self,
        hashes: Sequence[str],
        pages_of: Callable[[], Sequence[int] | None],
        behind: Behind = contextlib.nullcontext,
        last: Mapping[str, int] = NO_LAST,
    ) -> None:
        """Store pages, in the order of the prompt. SGLang must keep them until `take_offload` has
        returned for them.

        Args:
            pages_of: returns the numbers of their blocks; None after an error, which fails the
                offload. Not called if all are stored already.
            behind: the copies follow the work that SGLang has queued so far.
            last: see `load`.
        """
        (before, tenant), self._origin = self._origin, Origin()
        offload = Offload(tenant=tenant)
        self._pending.append(offload)
        consequence = "other engines do not describe them"
        with self.boundary.guard("describing pages for KV events", consequence, loses=False):
            if self.events is not None:
                self.events.offered(self.keys_of(hashes))

        def make(cache: CacheClient) -> Made:
            keys, own = self.keys_of(hashes), self.keys_of([before] if before else [])
            return offload.reserve(cache, own, keys, self.trailing.keys_of(keys, last))

        number, cell, copied = self._decide("storing blocks", "they are not cached", make)
        if not number:
            if offload.transfer_id:  # after an error; the next poll cancels it
                offload.transfer_id, offload.stored = 0, False
            return
        if self._ordered is not None:
            self._ordered.offloads[number] = offload
        with self.boundary.guard("starting stores", "the blocks are not cached"):
            pages = pages_of()
            if pages is not None:
                half = len(copied) // 2
                order = CopyOrder(number, cell, [pages[i] for i in copied[:half]], copied[half:])
                with behind():
                    self._worker.start_stores(StepOrders(stores=[order]))
                return
        with self.boundary.guard("failing stores", "the blocks are not cached"):
            self._worker.fail_stores(StepOrders(stores=[CopyOrder(number, cell, [], [])]))

    def ended_offloads(self) -> int:
        """How many of the oldest offloads have ended. Called once in each step. SGLang takes the
        least number of all ranks of a stage. Ranks that do not decide therefore count all."""
        ended = self._ended_offloads()
        if self.staged is None:
            return ended
        with self.boundary.guard("ending messages", "the next step ends them", loses=False):
            self.staged.links.step_begins()
        pending = [*islice(self._pending, _PASSED_ON)]
        states = [
            _UNDER_WAY
            if i >= ended
            else _STORED
            if each.stored and not each.transfer_id
            else _FAILED
            for i, each in enumerate(pending)
        ]
        if pending:
            place, consequence = "passing on the ends of offloads", "the next step passes them on"
            states = self._exchanges.decide(place, consequence, lambda: states, len(pending))
        self._passed_on = deque(takewhile(bool, states))
        return len(self._passed_on)

    def _ended_offloads(self) -> int:
        with self.boundary.guard("measuring a step", "its time is not measured", loses=False):
            step, self._step = self._step, 0
            self._chooser.timer.ended(step)
        with self.boundary.guard(_POLLING, "they are polled in the next step"):
            self._worker.finished(StepOrders(has_forward=True))
            self.poll()
        if self.boundary.lasts(_POLLING):
            self.boundary.gave_up(
                _POLLING,
                f"the copies of rank {self._exchanges.ranks.rank} end, SGLang gets their pages "
                f"back, loads and stores are disabled",
            )
        # A success after that enables nothing: the copies have ended for good.
        if self._gave_up and self._disabled():
            return len(self._pending)
        return len([*takewhile(lambda each: not each.transfer_id, self._pending)])

    def take_offload(self) -> bool:
        """Remove the oldest offload, which must have ended. Returns whether it is stored."""
        offload = self._pending.popleft()
        if self.staged is not None:
            return self._passed_on.popleft() == _STORED
        return not self.leads or (offload.stored and not offload.transfer_id)

    # The engine.

    def reset(self) -> None:
        """SGLang frees all pages. Waits until no copy reads or writes them. Stored blocks stay, and
        those of copies that end here too, unless the epoch is mixed."""
        self._change_keys(self._flushed)
        for rid in list(self._queued):
            self.cancel(rid)
        self._pending.clear()
        self._ended_batch = self._batch
        self.await_copies()

    def clear(self) -> bool:
        """Forget all blocks in all tiers, at a user's request. If that fails, which the result
        says, nothing is loaded or stored until it succeeds."""
        cache = self._cache
        if cache is None or not cache.info.is_shared:
            return self._forget(None if cache is None else partial(cache.reset, Reset.CLEAR))
        # Other engines keep their blocks.
        return self._forget(lambda: self._renew(mixed=self.page_keys.mixed))

    def empty(self) -> bool:
        """Forget all blocks of host memory and disks, on the rank that decides; otherwise as
        `clear`. See `Reset.EMPTY`."""
        cache = self._cache
        return self._forget(None if cache is None else partial(cache.reset, Reset.EMPTY))

    def _forget(self, forget: Callable[[], None] | None) -> bool:
        if self._cache is None or forget is None or self._gave_up:
            return self._cache is None
        with self.boundary.guard(
            "clearing the cache", "nothing is loaded or stored until it succeeds", loses=False
        ):
            self._cache.reset(Reset.SUSPEND)
            if self.requests is not None:
                self.requests.waiting.end_fetches()
            forget()
            return True
        return False

    def await_copies(self) -> None:
        """Wait until no copy reads or writes SGLang's pages. SGLang may wait for no load."""
        with self.boundary.guard("ending copies", "copies end, now and for good"):
            self._worker.drain()
            self._worker.take_bad_blocks()
            self.poll()
            return
        # Not guarded: if the copies do not end, they write to pages that SGLang gives to others.
        self._worker.stop_copying()

    def weights_changed(self, *, flushed: bool) -> None:
        """The weights in memory differ from the model's files now; see `KeyEpoch.renew`. `flushed`:
        whether SGLang has flushed its own cache since the change."""
        self._change_keys(partial(self._renew, mixed=not flushed))

    def _change_keys(self, change: Callable[[], None]) -> None:
        with self.boundary.guard(
            "changing the keys", "nothing is loaded or stored until the cache is cleared"
        ):
            change()
            return
        if self._cache is not None:
            self._cache.reset(Reset.SUSPEND)

    def _flushed(self) -> None:
        self.delayed.clear()
        if self.page_keys.flushed():
            self._renew(mixed=False)

    def _renew(self, *, mixed: bool) -> None:
        self.page_keys.renew(mixed=mixed)
        self.delayed.clear()
        if self.requests is not None:
            self.requests.forget_keys()
        with self.boundary.guard("emitting KV events", "subscribers know pages of other weights"):
            if self.events is not None:
                self.events.forget_all(self.page_keys.epoch.end)
        if self._cache is not None:
            self._cache.reset(Reset.RENEW, "weights")

    def close(self, flush_seconds: float) -> None:
        """End all copies; close the cache, which may write for `flush_seconds`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.reset()
        with (
            self.boundary.guard("shutdown", "the kernel cleans up when the process ends"),
            contextlib.ExitStack() as ends,
        ):
            # Each of them, also if another one fails.
            ends.callback(self._leave, flush_seconds)
            if self.requests is not None:
                ends.callback(self.requests.close)

    @property
    def has_samples(self) -> bool:
        """Whether `take_samples` may have something."""
        requests = self.requests
        return self._worker.has_figures or (requests is not None and requests.figures.active)

    def take_samples(self) -> Samples:
        """The counts of this rank since the last call."""
        samples = self._worker.figures.take()
        if self.requests is not None:
            add(samples, self.requests.figures.take())
        return samples

    def _leave(self, flush_seconds: float) -> None:
        if self._cache is None or self._cache.close(flush_seconds):
            self._worker.close()

    def _held(self, rids: Sequence[str]) -> list[bool]:
        assert self.requests is not None
        ended = self._ended_batch if self.is_loading else self._batch + 1
        return self.requests.waiting.held(rids, ended)

    def _decide(
        self, place: str, consequence: str, make: Callable[[CacheClient], Made]
    ) -> tuple[int, int, list[int]]:
        """Number and cell of a transfer that rank 0 makes, and the numbers with it; zeros without
        one. All ranks that know it report its end."""
        own: Sequence[int] = ()

        def decision() -> Sequence[int]:
            nonlocal own
            assert self._cache is not None
            made = make(self._cache)
            full = int(self._cache.status.is_full)
            if made is None:
                return 0, 0, 0, full
            transfer, own = made
            return transfer.id, transfer.cell, len(own), full

        number, cell, count, full = self._exchanges.decide(place, consequence, decision, 4)
        # SGLang evicts windows and states before the pages of their prefix. Stages of a pipeline
        # cannot tell the first one that they lack a page.
        at_once = self.may_wait or bool(self.trailing) or self.staged is not None
        self.delays = bool(full) and not at_once
        if number and self._ordered is not None:
            self._ordered.offloads[number] = None
        return number, cell, self._exchanges.ranks.agree(own, count) if number else []

    def _note_loads(self, orders: StepOrders) -> None:
        with self.boundary.guard("noting ended loads", "the next step notes them"):
            self.poll()
            report = self._worker.report(orders)
            self._chooser.loaded(0.0 if report is None else report.load_rate)

    def _disabled(self) -> bool:
        """End all copies for good, because no poll finds their ends and SGLang waits for them.
        Returns False after an error: the copies may still run."""
        with self.boundary.guard("disabling the cache", "the next step tries again"):
            self._worker.stop_copying()
            if self._cache is not None and self.requests is not None:
                for offload in self._pending:
                    if offload.transfer_id:
                        # Another rank may copy on, out of pages that SGLang gives to others.
                        self._cache.end_transfer(offload.transfer_id, TransferEnd.DISCARD)
                self._cache.reset(Reset.STOP)
                self.requests.figures.note_activity()
                self.requests.waiting.end_fetches()
            return True
        return False

    def poll(self) -> None:
        """Note the transfers that have ended, as the ranks' boards say."""
        if self._ordered is not None and self._ordered.poll() and self.requests is not None:
            self.requests.figures.note_activity()
