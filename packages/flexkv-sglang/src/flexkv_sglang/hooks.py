# SPDX-License-Identifier: Apache-2.0
"""Hooks of SGLang's own classes. They are installed in the scheduler's process when a linker
starts.

A linker cannot answer "not yet": SGLang would compute a prompt while the disk reads its prefix.
FlexKV therefore hides such a request from the scheduler until the blocks are in host memory. SGLang
schedules other requests meanwhile. SGLang's own storage backends hold requests back the same way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from operator import not_
from typing import Any, TypeAlias

from flexkv.engine.choice.cost import Span
from flexkv.types.tenants import tenant_number
from flexkv_sglang.copies import Origin
from flexkv_sglang.delayed_offloads import AT_ONCE
from flexkv_sglang.events import follow, learn_early
from flexkv_sglang.hashes import PageHashes, missing_pages
from flexkv_sglang.requests import SglangRequests
from flexkv_sglang.side import RankSide
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

_WEIGHTS = "weights"
"""SGLang's tag of the memory that holds weights. A call without tags means all memory."""

_LEARNING = "learning of pages for KV events"

_FULL = 0
"""SGLang's number of the component that holds full attention's pages."""

Call: TypeAlias = Callable[..., Any]

_side: RankSide | None = None


def serve(side: RankSide) -> None:
    """Hook SGLang's classes to the side of this process. The first call replaces the methods; they
    stay replaced. The side is borrowed until `leave`."""
    global _side  # noqa: PLW0603 - SGLang's classes have no place for it
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _side is None:
        for name, hook in HOOKS.items():
            HookRegistry.register(name, hook, HookType.AROUND)
        HookRegistry.apply_hooks()
    _side = side


def leave(side: RankSide) -> None:
    """Unhook this side. Idempotent."""
    global _side  # noqa: PLW0603 - see `serve`
    if _side is side:
        _side = None


def _hook(hook: Call) -> Call:
    """Decorate a function that is called in place of a method of SGLang's, with the side and the
    method. Without a side, the method is called."""

    @functools.wraps(hook)
    def call(original: Call, *args: Any, **kwargs: Any) -> Any:
        if _side is None:
            return original(*args, **kwargs)
        return hook(_side, original, *args, **kwargs)

    return call


@_hook
def schedule(side: RankSide, original: Call, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of SGLang's choice of prompts to compute. Hides requests that wait for a lower tier."""
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
    side: RankSide, original: Call, scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    queue = scheduler.waiting_queue
    if not (side.may_wait or side.is_loading or len(queue) > 1):
        return original(scheduler, *args, **kwargs)
    if side.requests is not None:
        with side.boundary.guard("looking ahead", "the next step goes on"):
            _look_ahead(side, side.requests, scheduler)
    # Those behind have not been looked up. A step looks at no more, however many wait.
    window = queue[:WINDOW]
    waits = side.held([request.rid for request in window])
    if not any(waits):
        return original(scheduler, *args, **kwargs)
    queue[:WINDOW] = compress(window, map(not_, waits))
    try:
        made = original(scheduler, *args, **kwargs)
    finally:
        _put_back(scheduler.waiting_queue, window, waits)
    with side.boundary.guard("resting", "SGLang's loop goes on at once", loses=False):
        batch, running = made
        idle = batch is None and running.is_empty() and scheduler.last_batch is None
        if idle and not (side.requests is not None and side.requests.waiting.looks_ahead):
            time.sleep(_REST_SECONDS)
    return made


def _put_back(queue: list[Any], window: Sequence[Any], waits: Sequence[bool]) -> None:
    """Add the requests that SGLang did not see to the queue that it has left.

    Args:
        window: the first requests of the queue before the step.
        waits: which of them SGLang did not see.
    """
    left = {id(each) for each in queue[: len(window)]}
    front = [each for each, held in zip(window, waits, strict=True) if held or id(each) in left]
    held = [*compress(window, waits)]
    seen = queue[: len(front) - len(held)]
    # The others that SGLang has left come first, unless it has sorted its queue.
    if seen == [each for each in front if id(each) in left]:
        queue[: len(seen)] = front
    else:
        queue[:0] = held


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


@_hook
def decode(side: RankSide, original: Call, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of the step in which a decode server (PD disaggregation) looks at its queues. Polls
    offloads first: SGLang polls only HiCache there, and would keep all offloaded pages. Such a
    server computes no prompts, so that its requests are forgotten once they have their pages."""
    scheduler.tree_cache.check_hicache_events()
    _report_batch(side, (), scheduler)
    return original(scheduler, *args, **kwargs)


@_hook
def match(side: RankSide, original: Call, wrapper: Any, *lookup: Any) -> Any:
    """Hook of SGLang's lookup for a request behind what its own cache has: the prompt's key, the
    request, and the result there. Reports the request."""
    if side.requests is not None:
        with side.boundary.guard(
            "reading a request", "it loads nothing, or as without parameters", loses=False
        ):
            _, request, result = lookup
            side.requests.matched(request, result.device_prefix_len)
    return original(wrapper, *lookup)


@_hook
def agree_on_prefix(
    side: RankSide, original: Call, wrapper: Any, lengths: Sequence[int], **kwargs: Any
) -> int:
    """Hook of the exchange in which SGLang's ranks agree on a hit: an array of all lengths, of
    which each rank marks those that it can load. One rank of FlexKV decides, and one number is
    enough."""
    return side.agree_on_length(lengths)


@_hook
def load_back(side: RankSide, original: Call, wrapper: Any, request: Any) -> Any:
    """Hook of SGLang's order of a load. Reports how much of the hit lower tiers gave: SGLang counts
    that as `storage`, and the rest as `host`."""
    made = original(wrapper, request)
    with side.boundary.guard(
        "reporting where a hit came from", "it counts as host memory", loses=False
    ):
        request.storage_hit_length = side.fetched_tokens(request.rid)
    if side.staged is not None and request.rid in wrapper.inflight_load_rids:
        side.staged.queued(request)
    return made


@_hook
def finish_loads(side: RankSide, original: Callable[[Any], list[str]], wrapper: Any) -> list[str]:
    """Hook of SGLang's search for failed loads of a batch that it has computed: the ids of their
    requests, which SGLang then aborts. The stages of a pipeline abort them when the result of the
    batch arrives; see `process_result`."""
    staged = side.staged
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


@_hook
def process_result(side: RankSide, original: Call, scheduler: Any, batch: Any, result: Any) -> Any:
    """Hook of the arrival of a batch's result at a stage of a pipeline. All stages have loaded by
    then. Has SGLang abort the requests of the batch if a load failed on any of them."""
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


@_hook
def clear_storage(side: RankSide, original: Call, scheduler: Any, request: Any) -> Any:
    """Hook of SGLang's request to clear the storage behind its cache, which FlexKV is."""
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    cleared = side.clear()
    logger.info("FlexKV's blocks were cleared at a request: %s", "all" if cleared else "failed")
    return ClearHiCacheReqOutput(success=cleared)


@_hook
def offload(side: RankSide, original: Call, wrapper: Any, node: Any, transfers: Any) -> Any:
    """Hook of SGLang's offload of a tree node's pages. Reports the page before them in the prefix,
    and their tenant."""
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
            core = wrapper.cache.tree_core
            ((*_, own),) = core.collect_path_info([node])
            before = core.get_last_hash_value(own.parent_id)  # all hashes of a prefix take long
            _, salt = core.prefetch_anchor_info(node)
            side.comes_from(Origin(before, tenant_number(salt or "")))
    return original(wrapper, node, transfers)


@_hook
def offload_nodes(side: RankSide, original: Call, wrapper: Any, nodes: Sequence[int]) -> None:
    """Hook of SGLang's offload of nodes that it has made or used. Delays it if that gives more
    hits."""
    if not side.delays:
        original(wrapper, nodes)
        return
    side.delayed.wrapper = wrapper
    if side.leads:
        with side.boundary.guard("delaying offloads", "the pages are not cached", loses=False):
            for node in nodes:
                tokens = len(wrapper.cache.tree_core.get_component_device_value(node, _FULL))
                side.delayed.used(node, tokens)


@_hook
def poll_offloads(side: RankSide, original: Call, tree: Any) -> None:
    """Hook of the poll of offloads, once in each step. Begins delayed offloads whose pages SGLang
    may evict soon; all of them while a request runs whose blocks FlexKV is to keep."""
    original(tree)

    def due() -> Iterator[int]:
        if side.requests is not None and side.requests.keeping:
            return side.delayed.take(0, _OFFLOADED_TOKENS, latest=True)
        pool = tree.token_to_kv_pool_allocator
        left = pool.available_size() + tree.evictable_size() - pool.size // _RESERVE
        return side.delayed.take(max(0, left), _OFFLOADED_TOKENS)

    # Pages that are being copied are locked and count as neither free nor evictable.
    if side.delayed.wrapper is not None and not tree.linker.pending_offloads:
        _begin_delayed(side, due)


def _begin_delayed(side: RankSide, due: Callable[[], Iterator[int]]) -> None:
    """Begin offloads that waited; all ranks begin the same. `due`: returns the nodes to offload;
    called on the rank that decides. Those beyond `AT_ONCE` are not taken."""
    wrapper = side.delayed.wrapper
    transfers: dict[int, Any] = {}

    def choose() -> Sequence[int]:
        for node in due():
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


@_hook
def take_events(side: RankSide, original: Call, tree: Any) -> Any:
    """Hook of SGLang's publication of its tree's events. Appends FlexKV's events."""
    events = original(tree)
    with side.boundary.turn, side.boundary.guard("emitting KV events", "they are lost"):
        if side.events is not None:
            return follow(events, side.events, tree.page_size)
    return events


@_hook
def dispatch(side: RankSide, original: Call, dispatcher: Any, request: Any) -> Any:
    """Hook of SGLang's handling of a request to its scheduler. No stored block is found after one
    that is not known to leave the weights as they are, even if it fails, because it may have
    changed some. A change of the draft model alone counts, too: that model may share tensors with
    the target."""
    name = type(request).__name__
    attribute, harmless = _HARMLESS_PARTS.get(name, ("", frozenset[str]()))
    if name in _HARMLESS or getattr(request, attribute, None) in harmless:
        return original(dispatcher, request)
    flushes = side.page_keys.flushes
    try:
        return original(dispatcher, request)
    finally:
        _weights_changed(side, flushes, f"{name} may have changed SGLang's weights")


@_hook
def release_memory(side: RankSide, original: Call, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of SGLang's release of its memory. Lets all copies end first: SGLang unmaps its pages
    before it flushes its cache, and does not count offloads as work under way.

    Weights that are released without a copy in host memory are lost. What SGLang computes before it
    gets others has nothing in common with the stored blocks.
    """
    # The latest first: there may be no room for all.
    while side.delayed.wrapper is not None:
        _begin_delayed(side, lambda: side.delayed.take(0, side.delayed.tokens, latest=True))
    side.await_copies()
    flushes = side.page_keys.flushes
    released = original(updater, *args, **kwargs)
    request = next(iter((*args, *kwargs.values())), None)
    tags = getattr(request, "tags", None) or (_WEIGHTS,)
    if _WEIGHTS in tags and not side.weights_return:
        _weights_changed(side, flushes, "SGLang released its weights and keeps no copy of them")
    return released


def _weights_changed(side: RankSide, flushes: int, why: str) -> None:
    """`flushes`: how often SGLang had flushed its own cache before the change."""
    if side.leads:
        logger.info("FlexKV finds none of its earlier blocks from now on: %s", why)
    side.weights_changed(flushed=side.page_keys.flushes > flushes)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
_DECODE = "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

HOOKS: dict[str, Call] = {
    f"{_SCHEDULER}._get_new_batch_prefill_raw": schedule,
    f"{_SCHEDULER}.clear_hicache_storage_wrapped": clear_storage,
    f"{_STAGES}._pp_process_batch_result": process_result,
    f"{_DECODE}.process_decode_queue": decode,
    f"{_UPDATER}.release_memory_occupation": release_memory,
    f"{_WRAPPER}.match": match,
    f"{_WRAPPER}._sync_restorable_prefix": agree_on_prefix,
    f"{_WRAPPER}.load_back": load_back,
    f"{_WRAPPER}.finish_loads": finish_loads,
    f"{_WRAPPER}._offload_node": offload,
    f"{_WRAPPER}.offload_nodes": offload_nodes,
    f"{_TREE}.check_hicache_events": poll_offloads,
    f"{_TREE}.take_events": take_events,
    "sglang.utils.TypeBasedDispatcher.__call__": dispatch,
}
"""By its name each method of SGLang that is replaced, and the function that is called with it."""
