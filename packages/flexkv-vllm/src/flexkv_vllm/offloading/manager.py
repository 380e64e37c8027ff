# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of an offloading spec: vLLM decides what is loaded and stored, FlexKV keeps
the blocks. Runs inside vLLM's scheduler loop. Nothing here waits for anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from flexkv import CacheConfig
from flexkv.client import CacheClient, Reset, Transfer, TransferEnd
from flexkv.engine.boundary import ErrorBoundary, always, answers
from flexkv.engine.key_epoch import KeyEpoch
from flexkv.engine.scheduler.ended import EndedTransfers
from flexkv.engine.scheduler.scheduled_step import IdleSteps
from flexkv.engine.side_figures import CacheFigures, log_totals
from flexkv.types.presence import Presence
from flexkv_vllm.offloading.events import OffloadedBlocks
from flexkv_vllm.offloading.request import OffloadedRequest, RequestMaker, load_source
from flexkv_vllm.offloading.stats import connector_stats
from flexkv_vllm.weights import WeightWatch

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

_POLL_SECONDS = 1.0
"""Pause between two polls of an idle engine's cache."""
_POLLING = "polling the cache"
_ENDS = "vLLM ends rather than compute on missing bytes, unless a second try succeeds"


@dataclass(slots=True)
class ArenaBlocks(LoadStoreSpec):
    """The manager's order to the workers: FlexKV's end of a transfer job of vLLM's.

    Attributes:
        cell: where the ranks report on the completion board; None if there is nothing to copy. A
            load without a cell has failed.
        slots: one for each block of the job, in the order of its keys.
    """

    cell: int | None = None
    slots: Sequence[int] = ()


class FlexKVOffloadingManager(OffloadingManager):
    """All that vLLM's connector calls in its scheduler. One per engine; single-threaded, but for
    the polls by which old blocks leave an idle engine's cache.

    A block that was reported to vLLM as a hit stays until the end of the step: blocks of a cache of
    this engine alone are evicted only while a step's stores are prepared and between steps, and
    those of a shared cache are held.

    Args:
        cache: owned.
        unmap: closes the session with the arena; called once the cache is closed.
        settings: metrics show them, too.
        groups: number of vLLM's KV cache groups.
        shares: whether other engines may find blocks of this one.
        events: whether KV events are on.
    """

    def __init__(
        self,
        cache: CacheClient,
        unmap: Callable[[], None],
        boundary: ErrorBoundary,
        *,
        settings: CacheConfig,
        groups: int,
        fingerprint: str,
        shares: bool,
        events: bool,
    ) -> None:
        self._cache = cache
        self._unmap = unmap
        self._boundary = boundary
        self._groups = groups
        self._epoch = KeyEpoch()
        if cache.info.is_shared and not shares:
            self._epoch.renew()
        self._events = OffloadedBlocks(cache, self._epoch) if events else None
        self._maker = RequestMaker(settings.request_options, cache.info)
        self._figures = CacheFigures(cache, boundary, self._maker.put_counts)
        self._requests: dict[str, OffloadedRequest] = {}
        self._looked_up: dict[str, OffloadedRequest] = {}  # in this step
        self._ended = EndedTransfers(cache)
        self._ordered: set[int] = set()  # ids of the transfers under way that vLLM knows
        self._lost_some = False
        self._idle_steps = IdleSteps()
        self._untold_settings: CacheConfig | None = settings
        self._closed = self._is_off = False
        self._shut = threading.Event()
        boundary.after_error = partial(self._after_error, cache)
        self._weights = WeightWatch(self._weights_changed)
        self._figures.report_health(settings.session_root, "vllm", fingerprint)
        if cache.info.drops_old:
            threading.Thread(target=self._drop_old, name="flexkv-ages", daemon=True).start()

    # Requests.

    @answers(lambda *_, **__: RequestOffloadingContext(), "it is begun when it is looked up")
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._request(req_context)
        return RequestOffloadingContext()

    @answers(always(None), "its blocks may leave sooner")
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        self._looked_up.pop(req_context.req_id, None)
        if request is None:
            return
        with self._boundary.guard("ending a request", "its blocks may leave sooner"):
            self._release(request)
            self._end_fetch(request)
            self._cache.touch(self._own(request.keys))
            self._cache.ended(req_context.req_id, request.answer_tokens)
            return
        self._release(request)
        self._end_fetch(request)

    # Loads.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # One block a call, thousands for a long prompt. This cannot fail.
        request = self._requests.get(req_context.req_id)
        if request is None or key not in request.answers:
            return self._look_up(key, req_context)
        request.asked.append(key)
        return request.answers[key]

    @answers(always(LookupResult.MISS), "it is a miss")
    def _look_up(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """The first lookup of a request in a step, which finds the results for all its blocks."""
        if self._is_off:
            return LookupResult.MISS
        with self._boundary.guard("lookup", "it is a miss"):
            request = self._request(req_context)
            self._find(request)
            result = request.answers.get(key, LookupResult.MISS)
            request.answers[key] = result
            request.asked.append(key)
            return result
        known = self._requests.get(req_context.req_id)
        if known is not None:
            known.answers.update(dict.fromkeys(known.keys, LookupResult.MISS))
        return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        # One block a call, as above.
        return load_source(self._requests.get(req_context.req_id), key)

    @answers(lambda *_, **__: ArenaBlocks(), _ENDS)
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        for _ in range(2):
            with self._boundary.guard("ordering a load", _ENDS):
                return self._order_load(list(keys), req_context)
        return ArenaBlocks()

    @answers(always(None), "transfers that ended are seen later")
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._poll()

    # Stores.

    @answers(lambda *_, **__: _nothing_to_store(), "the blocks are not cached")
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for those of `keys` that have none. Blocks without room are not cached.

        Never returns None, which would ask vLLM to offer the blocks again in the next step.
        """
        return self._order_store(keys, req_context.req_id)

    @answers(always(None), "transfers that ended are seen later")
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        # Whether it is one is known from the board, where the ranks have reported.
        self._poll()

    # Steps.

    @answers(always(None), "nothing is fetched")
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        while self._looked_up:
            self._end_lookups(self._looked_up.popitem()[1])
        self._idle_steps.note(bool(self._requests))
        self._poll()
        for request_id in context.new_req_ids:
            request = self._requests.get(request_id)
            if request is not None:
                with self._boundary.guard("recording a request", "its use counts for nothing"):
                    self._end_fetch(request)
                    self._record(request)

    @answers(always(False), "copies end in the steps of later requests")
    def has_pending_work(self) -> bool:
        if self._events is not None and self._events.pending:
            return True
        return self._idle_steps.wanted(self._cache.busy or self._figures.active)

    @answers(lambda self: self._turn_off(), "FlexKV finds nothing until the engine is restarted")
    def reset_cache(self) -> None:
        self._weights.reset(self._pause, self._reset)

    def _weights_changed(self, *, sure: bool) -> None:
        with self._boundary.turn:
            self._reset("weights")

    @answers(always(()), "they are reported later, or lost")
    def take_events(self) -> Iterable[Any]:
        return () if self._events is None else self._events.take()

    @answers(always(None), "the counts come later, or are lost")
    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._is_off:
            self._figures.turned_off()
        if self._figures.is_due(busy=False) or self._boundary.failures:
            settings, self._untold_settings = self._untold_settings, None
            return connector_stats(self._figures.take(), settings)
        return None

    @answers(always(None), "the kernel cleans up when the process ends")
    def shutdown(self) -> None:
        """Leave the arena. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._shut.set()
        self._figures.close()
        unused = self._cache.close()
        log_totals(self._cache, self._boundary)
        if unused:
            self._unmap()

    # Behind the guards.

    def _request(self, context: ReqContext) -> OffloadedRequest:
        """The state of a request. It begins with the first call."""
        request = self._requests.get(context.req_id)
        if request is None:
            request = self._maker.make(context)
            self._requests[context.req_id] = request
        return request

    def _own(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The cache's keys of these blocks."""
        end = self._epoch.end
        return [key + end for key in keys] if end else keys

    def _find(self, request: OffloadedRequest) -> None:
        """Find where those of its blocks are that have no answer in this step."""
        if not self._looked_up:
            self._poll()
        self._looked_up[request.context.req_id] = request
        fetches = False
        if request.fetch is not None:
            state = self._cache.fetch_state(request.fetch)
            request.note(state)
            fetches = not state.done
        keys = request.keys
        if request.answers:
            keys = [key for key in keys if key not in request.answers]
        there = self._cache.presence(self._own(keys))
        hit, host = LookupResult.HIT, Presence.HOST if request.from_host else None
        results = {
            key: hit if each is host else request.answer(key, each, fetches=fetches)
            for key, each in zip(keys, there, strict=True)
        }
        if self._cache.info.is_shared:
            hits = [key for key in keys if results[key] is LookupResult.HIT]
            if not self._holds(request, hits):
                results.update(dict.fromkeys(hits, LookupResult.MISS))
        request.answers.update(results)

    def _holds(self, request: OffloadedRequest, keys: Sequence[bytes]) -> bool:
        """Hold blocks until the end of the step: other engines may evict them. Returns False if one
        of them has left."""
        if not keys:
            return True
        transfer = self._cache.load(self._own(keys))
        if transfer is None:
            return False
        request.held.append(transfer.id)
        return True

    def _release(self, request: OffloadedRequest) -> None:
        while request.held:
            self._cache.end_transfer(request.held.pop(), TransferEnd.CANCEL)

    def _end_lookups(self, request: OffloadedRequest) -> None:
        """The step's lookups are over: fetch the blocks that only lower tiers have."""
        with self._boundary.guard("ending a step's lookups", "its blocks are not fetched"):
            self._release(request)
            wanted = request.lacking()
            if wanted:
                request.fetches(wanted)
                priority = request.options.priority or 0
                fetch = self._cache.fetch(self._own(wanted), priority=priority)
                self._end_fetch(request)  # only now, so that what is under way goes on for the new
                request.began_fetch(fetch, wanted)
                if fetch is not None:
                    request.note(self._cache.fetch_state(fetch))
            request.looked_up(self._groups)
            return
        # vLLM waits for no block that no fetch brings.
        request.fetches(request.asked)
        request.answers.clear()
        request.asked.clear()
        self._release(request)

    def _end_fetch(self, request: OffloadedRequest) -> None:
        if request.fetch is not None:
            request.note(self._cache.end_fetch(request.fetch))
            request.fetch = None

    def _record(self, request: OffloadedRequest) -> None:
        request.may_fetch_again()
        found, context = request.began()
        prompt = self._own(request.keys) if self._groups == 1 else None
        self._cache.record(self._own(found), context, prompt)

    def _order_load(self, keys: list[OffloadKey], context: ReqContext) -> LoadStoreSpec:
        transfer = self._cache.load(self._own(keys))
        if transfer is None:
            return ArenaBlocks()
        request = self._request(context)
        self._release(request)
        self._end_fetch(request)
        request.may_fetch_again()
        request.have_slots(keys)
        return self._order(transfer)

    def _order_store(self, keys: Collection[OffloadKey], request_id: str) -> PrepareStoreOutput:
        request = self._requests.get(request_id)
        if request is None or request.stale or not request.options.store:
            return _nothing_to_store()
        wanted = request.storable(keys)
        known = [*wanted, *request.ends]
        missing = {known[i] for i in self._cache.missing(self._own(known))}
        chain, positions, prefix_starts = request.offer(wanted, missing)
        transfer = None
        if positions:
            transfer = self._cache.store(self._own(chain), positions, prefix_starts)
        request.have_slots([key for key in wanted if key not in missing])
        if transfer is None:
            return _nothing_to_store()
        self._figures.note_activity()
        end = len(self._epoch.end)
        stored = [OffloadKey(key[: len(key) - end]) for key in transfer.keys]
        request.have_slots(stored)
        return PrepareStoreOutput(stored, self._order(transfer), [])

    def _order(self, transfer: Transfer) -> ArenaBlocks:
        """The order of a transfer for vLLM, which copies it. After an error before this, `_poll`
        cancels the transfer."""
        order = ArenaBlocks(transfer.cell, transfer.slots)
        self._ordered.add(transfer.id)
        return order

    # Resets.

    def _pause(self) -> bool:
        with self._boundary.guard("pausing", "all blocks are discarded"):
            self._forget_requests()
            self._cache.reset(Reset.PAUSE)
            self._figures.note_activity()
            return True
        return False

    def _reset(self, cause: str) -> bool:
        self._cache.reset(Reset.SUSPEND)
        with self._boundary.guard("reset", "nothing is loaded or stored until one succeeds"):
            self._forget_requests()
            self._cache.reset(Reset.CLEAR, cause)
            self._epoch.renew()  # a cache that others share keeps its blocks
            self._figures.note_activity()
            return True
        return False

    def _forget_requests(self) -> None:
        for request in self._requests.values():
            request.forget()
            self._end_fetch(request)

    def _turn_off(self) -> None:
        """Find no block any more, after a reset that may have left outdated ones."""
        self._is_off = True

    # What has ended.

    def _poll(self) -> None:
        if not self._ended.busy:
            return
        with self._boundary.guard(_POLLING, "transfers that ended are seen later"):
            self._figures.note_activity()
            if self._lost_some:
                self._ended.end_lost(self._ordered, self._ordered)
                self._lost_some = False
            for ended in self._ended.take():
                self._ordered.discard(ended.id)
            return
        if self._boundary.lasts(_POLLING):
            self._cache.reset(Reset.STOP)
            self._boundary.gave_up(_POLLING, "FlexKV loads and stores nothing")

    def _drop_old(self) -> None:
        while not self._shut.wait(_POLL_SECONDS):
            self._poll_between_steps()

    @answers(always(None), "old blocks leave later")
    def _poll_between_steps(self) -> None:
        if not (self._looked_up or self._closed):
            self._poll()

    def _after_error(self, cache: CacheClient) -> None:
        cache.reset(Reset.RECOVER)
        self._lost_some = True


def _nothing_to_store() -> PrepareStoreOutput:
    return PrepareStoreOutput([], ArenaBlocks(), [])
