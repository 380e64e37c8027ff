# SPDX-License-Identifier: Apache-2.0
"""Hooks of SGLang's own classes. They are installed in the scheduler's process when a linker
starts.

A linker cannot answer "not yet": SGLang would compute a prompt while the disk reads its prefix.
FlexKV therefore hides such a request from the scheduler until the blocks are in host memory. SGLang
schedules other requests meanwhile. SGLang's own storage backends hold requests back the same way.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from flexkv.engine.choice.cost import Span
from flexkv.types.tenants import tenant_number
from flexkv_sglang.copies import Origin
from flexkv_sglang.delayed_offloads import AT_ONCE
from flexkv_sglang.events import follow, learn_early
from flexkv_sglang.requests import SglangRequests
from flexkv_sglang.side import RankSide
from flexkv_sglang.tree import PageHashes, missing_pages
from flexkv_sglang.waiting import WINDOW

logger = logging.getLogger("flexkv.sglang")

_MATCHED_TOKENS = 1 << 15
"""Tokens of a step's new requests for which SGLang's own cache is searched: about 0.2 ms."""

_REST_SECONDS = 0.001
"""Seconds that SGLang's loop sleeps if all requests wait for lower tiers. Without the sleep, the
loop holds the GIL, and the reading threads wait up to 5 ms, Python's switch interval, for each
step. vLLM's loop sleeps as long."""

_RESERVE = 10
"""A part of SGLang's pool: one tenth is free or may be evicted without an offload. More than the
longest prompt of Mooncake's conversation trace takes of a pool of 5,000 pages. Tuned on nothing
else."""

_OFFLOADED_TOKENS = 1 << 14
"""Tokens after which no further delayed offload begins in a step: two chunks of a prompt."""

_ADMISSION = "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw"
_DECODE = "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_OFFLOAD = f"{_WRAPPER}._offload_node"
_OFFLOADS = f"{_WRAPPER}.offload_nodes"
_MATCH = f"{_WRAPPER}.match"
_AGREEMENT = f"{_WRAPPER}._sync_restorable_prefix"
_LOAD_BACK = f"{_WRAPPER}.load_back"
_LOADED = f"{_WRAPPER}.finish_loads"
_RESULT = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin._pp_process_batch_result"
_CLEAR = "sglang.srt.managers.scheduler.Scheduler.clear_hicache_storage_wrapped"
_EVENTS = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.take_events"
_POLL = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.check_hicache_events"
_DISPATCH = "sglang.utils.TypeBasedDispatcher.__call__"
_HARMLESS_NAMES = """
    AbortReq AddExternalCorpusReqInput AttachHiCacheStorageReqInput
    BatchTokenizedEmbeddingReqInput BatchTokenizedGenerateReqInput ClearHiCacheReqInput
    CloseSessionReqInput ConfigureLoggingReq ContinueGenerationReqInput
    DestroyWeightsUpdateGroupReqInput DetachHiCacheStorageReqInput ExpertDistributionReq
    FlushCacheReqInput FreezeGCReq GetHiCacheL3LayoutReq GetInternalStateReq
    GetWeightsByNameReqInput InitWeightsSendGroupForRemoteInstanceReqInput
    InitWeightsUpdateGroupReqInput ListExternalCorporaReqInput
    LoadLoRAAdapterFromTensorsReqInput LoadLoRAAdapterReqInput OpenSessionReqInput
    PauseGenerationReqInput PdRoleSwitchReqInput ProfileReq ReleaseMemoryOccupationReqInput
    RemoveExternalCorpusReqInput ResumeMemoryOccupationReqInput
    SendWeightsToRemoteInstanceReqInput SetInternalStateReq ShutdownReq SlowDownReqInput
    TokenizedEmbeddingReqInput TokenizedGenerateReqInput UnloadLoRAAdapterReqInput
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Requests to SGLang's scheduler that leave the model's weights as they are; see `release_memory`
for one of them. Each load of a LoRA adapter has an id of its own, which its pages' hashes cover."""

_HARMLESS_PARTS = {
    "CheckWeightsReqInput": ("action", frozenset({"checksum", "compare", "snapshot"})),
    "RpcReqInput": ("method", frozenset({"save_remote_model", "save_sharded_model"})),
}
"""Requests whose effect an attribute decides: that attribute, and its values that leave the model's
weights as they are."""

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RELEASE = f"{_UPDATER}.release_memory_occupation"
_WEIGHTS = "weights"
"""SGLang's tag of the memory that holds weights. A call without tags means all memory."""

_LEARNING = "learning of pages for KV events"

_FULL = 0
"""SGLang's number of the component that holds full attention's pages."""

_sides: list[RankSide] = []


def serve(side: RankSide) -> None:
    """Hook SGLang's classes to this side. The first call replaces the methods; they stay replaced.
    The side is borrowed until `leave`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not _sides:
        HookRegistry.register(_ADMISSION, schedule, HookType.AROUND)
        HookRegistry.register(_DECODE, decode, HookType.AROUND)
        HookRegistry.register(_OFFLOAD, offload, HookType.AROUND)
        HookRegistry.register(_OFFLOADS, offload_nodes, HookType.AROUND)
        HookRegistry.register(_POLL, poll_offloads, HookType.AROUND)
        HookRegistry.register(_MATCH, match, HookType.AROUND)
        HookRegistry.register(_AGREEMENT, agree_on_prefix, HookType.AROUND)
        HookRegistry.register(_LOAD_BACK, load_back, HookType.AROUND)
        HookRegistry.register(_LOADED, finish_loads, HookType.AROUND)
        HookRegistry.register(_RESULT, process_result, HookType.AROUND)
        HookRegistry.register(_CLEAR, clear_storage, HookType.AROUND)
        HookRegistry.register(_EVENTS, take_events, HookType.AROUND)
        HookRegistry.register(_DISPATCH, dispatch, HookType.AROUND)
        HookRegistry.register(_RELEASE, release_memory, HookType.AROUND)
        HookRegistry.apply_hooks()
    _sides.append(side)


def leave(side: RankSide) -> None:
    """Unhook this side. Idempotent."""
    if side in _sides:
        _sides.remove(side)


def schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of SGLang's choice of prompts to compute. Hides requests that wait for a lower tier."""
    side = next(iter(_sides), None)
    if side is None:
        return original(scheduler, *args, **kwargs)
    with _grammars_polled(scheduler):
        made = _schedule_ready(side, original, scheduler, *args, **kwargs)
    batch, _ = made
    requests = () if batch is None else batch.reqs
    _report_batch(side, requests, scheduler)
    if scheduler.device == "cpu" and side.staged is None:
        # On other devices, SGLang prepares the next step before this one ends, so its time is
        # unknown. So is that of the other stages of a pipeline.
        with side.boundary.guard("measuring a batch", "its time is not measured", loses=False):
            side.batch_begins([Span(each.prefix_len, each.extend_end) for each in requests])
    return made


def _report_batch(side: RankSide, requests: Sequence[Any], scheduler: Any) -> None:
    """Report the requests that SGLang computes next."""
    if side.requests is not None:
        with side.boundary.guard(
            "following a batch", "its requests are not counted or recorded", loses=False
        ):
            early = getattr(scheduler, "disagg_decode_prealloc_queue", None)
            queue: list[Any] = [] if early is None else early.queue
            waiting = chain(scheduler.waiting_queue, (each.req for each in queue))
            side.requests.scheduled(requests, waiting, PageHashes(scheduler.tree_cache))


@contextlib.contextmanager
def _grammars_polled(scheduler: Any) -> Iterator[None]:
    """Add the requests whose grammars are compiled to SGLang's queue, and hide the others. SGLang
    adds them itself within its choice, which would take them before FlexKV has looked them up."""
    manager = scheduler.grammar_manager
    if manager.has_waiting_grammars():
        for request in manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(request)
    manager.grammar_queue, hidden = [], manager.grammar_queue
    try:
        yield
    finally:
        manager.grammar_queue = hidden


def _schedule_ready(
    side: RankSide, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    queue = scheduler.waiting_queue
    if not (side.may_wait or side.is_loading or len(queue) > 1):
        return original(scheduler, *args, **kwargs)
    if side.requests is not None:
        with side.boundary.guard("looking ahead", "the next step goes on"):
            _look_ahead(side, side.requests, scheduler)
    # Those behind have not been looked up. A step looks at no more, however many wait.
    window = queue[:WINDOW]
    held = side.held([request.rid for request in window])
    if not any(held):
        return original(scheduler, *args, **kwargs)
    waiting = {id(request) for request, waits in zip(window, held, strict=True) if waits}
    seen = [each for each in window if id(each) not in waiting] + queue[WINDOW:]
    scheduler.waiting_queue = seen.copy()
    try:
        made = original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = _with_held(queue, waiting, seen, scheduler.waiting_queue)
    with side.boundary.guard("resting", "SGLang's loop goes on at once", loses=False):
        batch, running = made
        idle = batch is None and running.is_empty() and scheduler.last_batch is None
        if idle and not (side.requests is not None and side.requests.waiting.looks_ahead):
            time.sleep(_REST_SECONDS)
    return made


def _with_held(queue: list[Any], held: set[int], seen: list[Any], left: list[Any]) -> list[Any]:
    """SGLang's queue after a step.

    Args:
        queue: before the step.
        held: the requests of it that SGLang did not see, by `id`.
        seen: those that it saw.
        left: those that it left, and requests that it put back. The latter come last, as in its own
            queue.
    """
    if left == seen:  # as if the batch is full: each request is the same object
        return queue
    ids, known = {id(each) for each in left}, {id(each) for each in queue}
    return [
        *(each for each in queue if id(each) in held or id(each) in ids),
        *(each for each in left if id(each) not in known),
    ]


def decode(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of the step in which a decode server (PD disaggregation) looks at its queues. Polls
    offloads first: SGLang polls only HiCache there, and would keep all offloaded pages. Such a
    server computes no prompts, so that its requests are forgotten once they have their pages."""
    if _sides:
        scheduler.tree_cache.check_hicache_events()
        _report_batch(_sides[0], (), scheduler)
    return original(scheduler, *args, **kwargs)


def match(original: Callable[..., Any], wrapper: Any, key: Any, request: Any, result: Any) -> Any:
    """Hook of SGLang's lookup for a request behind what its own cache has, `result`. Reports the
    request."""
    for side in _sides:
        if side.requests is not None:
            with side.boundary.guard(
                "reading a request", "it loads nothing, or as without parameters", loses=False
            ):
                side.requests.matched(request, result.device_prefix_len)
    return original(wrapper, key, request, result)


def agree_on_prefix(
    original: Callable[..., int], wrapper: Any, lengths: Sequence[int], **kwargs: Any
) -> int:
    """Hook of the exchange in which SGLang's ranks agree on a hit: an array of all lengths, of
    which each rank marks those that it can load. One rank of FlexKV decides, and one number is
    enough."""
    for side in _sides:
        return side.agree_on_length(lengths)
    return original(wrapper, lengths, **kwargs)


def load_back(original: Callable[..., Any], wrapper: Any, request: Any) -> Any:
    """Hook of SGLang's order of a load. Reports how much of the hit lower tiers gave: SGLang counts
    that as `storage`, and the rest as `host`."""
    made = original(wrapper, request)
    for side in _sides:
        with side.boundary.guard(
            "reporting where a hit came from", "it counts as host memory", loses=False
        ):
            request.storage_hit_length = side.fetched_tokens(request.rid)
        if side.staged is not None and request.rid in wrapper.inflight_load_rids:
            side.staged.queued(request)
    return made


def finish_loads(original: Callable[..., list[str]], wrapper: Any) -> list[str]:
    """Hook of SGLang's search for failed loads of a batch that it has computed: the ids of their
    requests, which SGLang then aborts. The stages of a pipeline abort them when the result of the
    batch arrives; see `process_result`."""
    staged = next((side.staged for side in _sides), None)
    if staged is None:
        return original(wrapper)
    if staged.failed is not None:
        failed, staged.failed = staged.failed, None
        return failed
    rids, batch = [*wrapper.inflight_load_rids], wrapper.inflight_load_index
    failed = original(wrapper)
    if rids:
        staged.computed(batch, rids, landed=not failed)
    return []


def process_result(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Hook of the arrival of a batch's result at a stage of a pipeline. All stages have loaded by
    then. Has SGLang abort the requests of the batch if a load failed on any of them."""
    for side in _sides:
        number = batch.hicache_consumer_index
        if side.staged is not None and side.staged.has(number):
            failed = side.staged.take_verdict(number)
            side.loads_known(number)
            if failed:
                side.staged.failed = [each.rid for each in failed]
                marked = scheduler.tree_cache.finish_external_linker_loads(failed)
                if scheduler.chunked_req in marked:
                    # As SGLang does where it searches for failed loads itself.
                    scheduler._pending_chunked_abort_req = scheduler.chunked_req
    return original(scheduler, batch, result)


def clear_storage(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Hook of SGLang's request to clear the storage behind its cache, which FlexKV is."""
    if not _sides:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    cleared = [side.clear() for side in _sides]
    logger.info(
        "FlexKV's blocks were cleared at a request: %s", "all" if all(cleared) else "failed"
    )
    return ClearHiCacheReqOutput(success=all(cleared))


def offload(original: Callable[..., Any], wrapper: Any, node: Any, transfers: Any) -> Any:
    """Hook of SGLang's offload of a tree node's pages. Reports the page before them in the prefix,
    and their tenant."""
    for side in _sides:
        with (
            side.boundary.turn,
            side.boundary.guard(_LEARNING, "other engines do not describe them", loses=False),
        ):
            if side.events is not None:
                # Before the store: others of the node's service hear of the pages when it ends.
                learn_early(wrapper.cache.tree_core.take_events(), side.events)
        with side.boundary.guard(
            "following the tree", "blocks may outlive the prefix before them", loses=False
        ):
            if side.leads:
                prefix = wrapper.cache.get_prefix_hash_values(node)
                _, salt = wrapper.cache.tree_core.prefetch_anchor_info(node)
                before = prefix[-1] if prefix else None
                side.comes_from(Origin(before, tenant_number(salt or "")))
    return original(wrapper, node, transfers)


def offload_nodes(original: Callable[..., None], wrapper: Any, nodes: Sequence[int]) -> None:
    """Hook of SGLang's offload of nodes that it has made or used. Delays it if that gives more
    hits."""
    side = next(iter(_sides), None)
    if side is None or not side.delays:
        original(wrapper, nodes)
        return
    side.delayed.wrapper = wrapper
    if side.leads:
        with side.boundary.guard("delaying offloads", "the pages are not cached", loses=False):
            for node in nodes:
                tokens = len(wrapper.cache.tree_core.get_component_device_value(node, _FULL))
                side.delayed.used(node, tokens)


def poll_offloads(original: Callable[..., None], tree: Any) -> None:
    """Hook of the poll of offloads, once in each step. Begins delayed offloads whose pages SGLang
    may evict soon; all of them while a request runs whose blocks FlexKV is to keep."""
    original(tree)

    def due(side: RankSide) -> Iterator[int]:
        if side.requests is not None and side.requests.reports.keeping:
            return side.delayed.take_latest(_OFFLOADED_TOKENS)
        pool = tree.token_to_kv_pool_allocator
        left = pool.available_size() + tree.evictable_size() - pool.size // _RESERVE
        return side.delayed.take(max(0, left), _OFFLOADED_TOKENS)

    for side in _sides:
        # Pages that are being copied are locked and count as neither free nor evictable.
        if side.delayed.wrapper is not None and not tree.linker.pending_offloads:
            _begin_delayed(side, due)


def _begin_delayed(side: RankSide, due: Callable[[RankSide], Iterator[int]]) -> None:
    """Begin offloads that waited; all ranks begin the same.

    Args:
        due: returns the nodes to offload; called on the rank that decides. Those beyond `AT_ONCE`
            are not taken.
    """
    wrapper = side.delayed.wrapper
    transfers: dict[int, Any] = {}

    def choose() -> Sequence[int]:
        for node in due(side):
            made = _offload_of(wrapper, node)
            if made:
                transfers[node] = made
            if len(transfers) == AT_ONCE:
                break
        return list(transfers)

    def have_all() -> bool:
        for node in nodes:
            transfers.setdefault(node, _offload_of(wrapper, node))
        return all(transfers.values())

    nodes = side.delayed.agree(choose)
    # SGLang's trees are alike, unless something went wrong on one rank.
    if nodes and side.delayed.can_all(have_all):
        for node in nodes:
            # Not guarded: the ranks agree in each of these calls, of SGLang's.
            wrapper._offload_node(node, transfers[node])


def _offload_of(wrapper: Any, node: int) -> Any:
    """SGLang's transfers of a node's pages; None if the node was evicted or is offloaded."""
    try:
        return wrapper.cache.tree_core.build_external_linker_offload_transfers(node) or None
    except KeyError:
        return None


def take_events(original: Callable[..., Any], tree: Any) -> Any:
    """Hook of SGLang's publication of its tree's events. Appends FlexKV's events."""
    events = original(tree)
    for side in _sides:
        with side.boundary.turn, side.boundary.guard("emitting KV events", "they are lost"):
            if side.events is not None:
                return follow(events, side.events, tree.page_size)
    return events


def dispatch(original: Callable[..., Any], dispatcher: Any, request: Any) -> Any:
    """Hook of SGLang's handling of a request to its scheduler. No stored block is found after one
    that is not known to leave the weights as they are, even if it fails, because it may have
    changed some. A change of the draft model alone counts, too: that model may share tensors with
    the target."""
    name = type(request).__name__
    attribute, harmless = _HARMLESS_PARTS.get(name, ("", frozenset[str]()))
    if name in _HARMLESS or getattr(request, attribute, None) in harmless:
        return original(dispatcher, request)
    before = [side.page_keys.flushes for side in _sides]
    try:
        return original(dispatcher, request)
    finally:
        _weights_changed(before, f"{name} may have changed SGLang's weights")


def release_memory(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of SGLang's release of its memory. Lets all copies end first: SGLang unmaps its pages
    before it flushes its cache, and does not count offloads as work under way.

    Weights that are released without a copy in host memory are lost. What SGLang computes before it
    gets others has nothing in common with the stored blocks.
    """
    for side in _sides:
        # The latest first: there may be no room for all.
        while side.delayed.wrapper is not None:
            _begin_delayed(side, lambda side: side.delayed.take_latest())
        side.await_copies()
    before = [side.page_keys.flushes for side in _sides]
    released = original(updater, *args, **kwargs)
    request = next(iter((*args, *kwargs.values())), None)
    tags = getattr(request, "tags", None) or (_WEIGHTS,)
    if _WEIGHTS in tags and not all(side.weights_return for side in _sides):
        _weights_changed(before, "SGLang released its weights and keeps no copy of them")
    return released


def _weights_changed(before: Sequence[int], why: str) -> None:
    """`before`: the number of flushes of each side before the change."""
    for side, flushes in zip(_sides, before, strict=True):
        if side.leads:
            logger.info("FlexKV finds none of its earlier blocks from now on: %s", why)
        side.weights_changed(flushed=side.page_keys.flushes > flushes)


def _look_ahead(side: RankSide, requests: SglangRequests, scheduler: Any) -> None:
    """Look up new requests of the queue, as far as a step has time."""
    tree, tokens = scheduler.tree_cache, 0
    for request in scheduler.waiting_queue[:WINDOW]:
        if tokens >= _MATCHED_TOKENS:
            break
        with side.boundary.guard(
            "searching SGLang's cache", "the request is looked up at its turn", loses=False
        ):
            if requests.waiting.is_new(request.rid):
                tokens += len(request.origin_input_ids)
                most = requests.limit(request)
                # Streaming sessions keep their pages outside the tree, and nothing is loaded.
                if most != 0 and not getattr(request.session, "streaming", False):
                    states = side.trailing.have_states
                    missing = missing_pages(tree, request, has_states=states, most=most)
                    requests.look_ahead(request, missing)
    requests.waiting.go_on()
