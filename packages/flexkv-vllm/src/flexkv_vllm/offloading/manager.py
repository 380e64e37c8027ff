# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of an offloading spec: vLLM decides what is loaded and stored, FlexKV keeps
the blocks. Runs inside vLLM's scheduler loop. Nothing here waits for anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
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
from flexkv.client import CacheClient, Reset, Transfer
from flexkv.engine.boundary import ErrorBoundary, always, answers
from flexkv.engine.scheduler.ended import EndedTransfers
from flexkv.engine.scheduler.scheduled_step import IdleSteps
from flexkv.engine.side_figures import log_totals
from flexkv_vllm.compat.offloading import load_source
from flexkv_vllm.offloading.events import OffloadedBlocks
from flexkv_vllm.offloading.held import HeldStores
from flexkv_vllm.offloading.orders import ArenaBlocks
from flexkv_vllm.offloading.prompts import OffloadedPrompts
from flexkv_vllm.offloading.stats import connector_stats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

ChooseReset = Callable[[Callable[[], bool], Callable[[str], bool]], bool]
"""See `WeightWatch.reset`."""


_POLLING = "polling the cache"


class FlexKVOffloadingManager(OffloadingManager):
    """All that vLLM's connector calls in its scheduler. One per engine; single-threaded.

    A block that was reported to vLLM as a hit stays until the end of the step: blocks of a cache of
    this engine alone are evicted only while a step's stores are prepared and between steps, and
    those of a shared cache are held.

    Args:
        cache: the cache of the engine; owned.
        unmap: closes the session with the arena; called once the cache is closed.
        boundary: catches errors.
        events: reports loadable blocks; None if KV events are off. Owned.
        settings: settings of the engine, which metrics show, too.
        prompts: follows requests through vLLM's connector; owned.

    Attributes:
        prompts: as given.
        held: the stores whose blocks are not known to be computed yet.
        choose_reset: decides whether a reset of vLLM's keeps or discards the blocks; discards them
            unless the owner sets it.
        weights_changed: to be called when the engine has other weights; discards every block. No
            method of the class, whose public ones are vLLM's.
    """

    def __init__(
        self,
        cache: CacheClient,
        unmap: Callable[[], None],
        boundary: ErrorBoundary,
        events: OffloadedBlocks | None,
        *,
        settings: CacheConfig,
        prompts: OffloadedPrompts,
    ) -> None:
        self._cache = cache
        self._unmap = unmap
        self._boundary = boundary
        self._events = events
        if events is not None:
            prompts.got_slots, prompts.pool_bound = events.describe, events.bind
        self.prompts = prompts
        prompts.before_match = self._poll
        self._requests, self._answers = prompts.by_id, prompts.answers
        self._figures, self._traced = prompts.figures, prompts.traced
        # By id of the loaded request the media of its blocks that came from lower tiers.
        self._fetched: dict[str, Mapping[bytes, Any]] = {}
        self._loading: dict[int, str] = {}
        self._ended = EndedTransfers(cache)
        self._ordered: set[int] = set()  # ids of the transfers under way that vLLM knows
        self._lost_some = False
        self.held = HeldStores(cache, boundary)
        prompts.distrust = self.held.discard
        self._idle_steps = IdleSteps()
        self._untold_settings: CacheConfig | None = settings
        self._closed = self._is_off = False
        prompts.may_find = self._may_find
        prompts.may_change = self._may_change
        prompts.empty = partial(self._forget, partial(cache.reset, Reset.EMPTY))
        boundary.after_error = self._after_error_in(cache)
        self.weights_changed: Callable[..., None] = self._weights_changed
        self.choose_reset: ChooseReset = lambda keep, discard: discard("request")

    # Requests.

    @answers(lambda *_: RequestOffloadingContext(), "it is begun when it is looked up")
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        with self._boundary.guard("beginning a request", "it is begun when it is looked up"):
            self.prompts.request(req_context)
        return RequestOffloadingContext()

    @answers(always(None), "its blocks may leave sooner")
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self.prompts.ended(req_context.req_id)
        self._fetched.pop(req_context.req_id, None)
        if request is None:
            return
        with self._boundary.guard("ending a request", "its blocks may leave sooner"):
            request.settle()
            self._cache.touch(list(request.stored))
            self.prompts.report_ended(request)
            return
        request.settle()

    # Loads.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # One block a call, thousands for a long prompt. This cannot fail.
        result = self._answers.get(key)
        return self._look_up(key, req_context) if result is None else result

    @answers(always(LookupResult.MISS), "it is a miss")
    def _look_up(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._may_find():
            return LookupResult.MISS
        with self._boundary.guard("lookup", "it is a miss"):
            return self.prompts.lookup(key, self.prompts.request(req_context))
        return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        # One block a call, as above.
        fetched = self._fetched.get(req_context.req_id)
        medium = None if fetched is None else fetched.get(key)
        return self._from_host if medium is None else load_source(medium)

    @cached_property
    def _from_host(self) -> Any:
        return load_source()

    @answers(lambda *_: ArenaBlocks(), "vLLM is told that it failed")
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        transfer = None
        with self._boundary.guard("ordering a load", "vLLM is told that it failed"):
            transfer = self._begin_load(keys, req_context)
        if transfer is None:
            self._load_no_more(req_context.req_id)
            return ArenaBlocks()
        return self._order(transfer)

    @answers(always(None), "transfers that ended are seen later")
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._poll()

    # Stores.

    @answers(lambda *_: _nothing_to_store(), "the blocks are not cached")
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for those of `keys` that have none. Blocks without room are not cached.

        Never returns None, which would ask vLLM to offer the blocks again in the next step.
        """
        transfer = None
        with self._boundary.guard("reserving blocks", "they are not cached"):
            transfer = self._reserve(list(keys), req_context.req_id)
        if transfer is None:
            return _nothing_to_store()
        reserved = [OffloadKey(key) for key in transfer.keys]
        return PrepareStoreOutput(reserved, self._order(transfer), [])

    @answers(always(None), "transfers that ended are seen later")
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        # Whether it is one is known from the board, where the ranks have reported.
        self.held.release(keys)
        self._poll()

    # Steps.

    @answers(always(None), "nothing is fetched")
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        with self._boundary.guard("ending a step's lookups", "nothing is fetched"):
            self.held.step_is_complete()
            self._idle_steps.note(bool(self._requests))
            self.prompts.hits.release_all()
            self._poll()
            self.prompts.fetch_lacking()
            for request_id in context.new_req_ids:
                if request_id in self._requests:
                    self._requests[request_id].settle()
            return
        self.prompts.fetch_nothing()

    @answers(always(False), "copies end in the steps of later requests")
    def has_pending_work(self) -> bool:
        if self._events is not None and self._events.pending:
            return True
        return self._idle_steps.wanted(self._cache.busy or self._figures.active)

    @answers(lambda self: self._turn_off(), "FlexKV finds nothing until the engine is restarted")
    def reset_cache(self) -> None:
        self.choose_reset(self._pause, self._reset)

    def _weights_changed(self, *, sure: bool) -> None:
        with self._boundary.turn:
            self._reset("weights")

    def _pause(self) -> bool:
        with self._boundary.guard("pausing", "all blocks are discarded"):
            self.prompts.forget()
            self._cache.reset(Reset.PAUSE)
            self.held.release_all()
            self._figures.note_activity()
            return True
        return False

    def _reset(self, cause: str) -> bool:
        return self._forget(partial(self._cache.reset, Reset.CLEAR, cause))

    def _forget(self, forget: Callable[[], None]) -> bool:
        self._cache.reset(Reset.SUSPEND)
        with self._boundary.guard("reset", "nothing is loaded or stored until one succeeds"):
            self.prompts.forget()
            forget()
            if self._events is not None:
                self._events.cleared()
            self.held.release_all()
            self._figures.note_activity()
            return True
        return False

    @answers(always(()), "they are told later, or lost")
    def take_events(self) -> Iterable[Any]:
        """The events for vLLM's subscribers; see `follow_connector`."""
        if self._events is not None:
            with self._boundary.guard("telling events", "they are told later, or lost"):
                return self._events.take()
        return ()

    @answers(always(None), "the counts come later, or are lost")
    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._is_off:
            self._figures.turned_off()
        if self._figures.is_due(busy=False) or self._boundary.failures:
            with self._boundary.guard("counting", "the counts come later, or are lost"):
                settings, self._untold_settings = self._untold_settings, None
                return connector_stats(self._figures.take(), settings)
        return None

    @answers(always(None), "the kernel cleans up when the process ends")
    def shutdown(self) -> None:
        """Leave the arena. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._boundary.guard("shutdown", "the kernel cleans up when the process ends"):
            self._figures.close()
            self.prompts.close()
            unused = self._cache.close()
            log_totals(self._cache, self._boundary)
            if unused:
                self._unmap()

    def _turn_off(self) -> None:
        """Find no block any more, after a reset that may have left outdated ones."""
        self._is_off = True

    def _may_change(self) -> bool:
        return not (self._is_off or self._closed or self.prompts.is_matching)

    def _may_find(self) -> bool:
        return not (self._is_off or self.held.lost)

    def _begin_load(self, keys: Collection[OffloadKey], context: ReqContext) -> Transfer | None:
        transfer = self._cache.load(list(keys))
        self.prompts.hits.release(context.req_id)
        if transfer is not None:
            request = self.prompts.request(context)
            self._fetched.pop(context.req_id, None)
            media = request.media()
            if media:
                self._fetched[context.req_id] = media
            request.settle()
            self._loading[transfer.id] = context.req_id
            self._traced.began(transfer.id, request.request, len(keys))
        return transfer

    def _order(self, transfer: Transfer) -> ArenaBlocks:
        """The order of a transfer for vLLM, which copies it. After an error before this, `_poll`
        cancels the transfer."""
        order = ArenaBlocks(transfer.cell, transfer.slots)
        self._ordered.add(transfer.id)
        return order

    def _load_no_more(self, request_id: str) -> None:
        """vLLM looks up the blocks of a failed load again, and would load them for ever."""
        request = self._requests.get(request_id)
        if request is not None:
            request.load_no_more()

    def _reserve(self, keys: list[OffloadKey], request_id: str) -> Transfer | None:
        request = self._requests.get(request_id)
        if request is None:
            # vLLM 0.26 reports the end of a request before it offers the request's last blocks.
            return None
        request.settle()  # it runs
        if request.stale or not request.options.store:
            return None
        wanted = request.storable(keys)
        chain, positions = request.offer(wanted)
        transfer = self._cache.store(chain, positions, held=True) if positions else None
        if transfer is not None:
            self._figures.note_activity()
            request.reserved(transfer.keys)
            self.held.hold(request_id, transfer)
            self._traced.began(transfer.id, request.request, len(transfer.keys))
            self.prompts.describe(request, transfer.keys)
        request.keep(wanted)
        return transfer

    def _poll(self) -> None:
        if not self._ended.busy:
            return
        with self._boundary.guard(_POLLING, "transfers that ended are seen later"):
            self._figures.note_activity()
            self._take_ended()
            return
        if self._boundary.lasts(_POLLING):
            self._cache.reset(Reset.STOP)
            self._boundary.gave_up(_POLLING, "FlexKV loads and stores nothing")

    def _take_ended(self) -> None:
        if self._lost_some:
            self.held.discard_all()
            self._ended.end_lost(self._ordered, {*self._loading, *self._ordered})
            self._lost_some = False
        for ended in self._ended.take():
            request_id = self._loading.get(ended.id)
            if request_id is not None and not ended.done:
                self._load_no_more(request_id)
            self._loading.pop(ended.id, None)
            self._traced.ended(ended)
            self._ordered.discard(ended.id)

    def _after_error_in(self, cache: CacheClient) -> Callable[[], None]:
        def after_error() -> None:
            cache.reset(Reset.RECOVER)
            self._lost_some = True

        return after_error


def _nothing_to_store() -> PrepareStoreOutput:
    return PrepareStoreOutput([], ArenaBlocks(), [])
