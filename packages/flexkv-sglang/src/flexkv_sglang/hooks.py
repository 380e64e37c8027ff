# SPDX-License-Identifier: Apache-2.0
"""Hooks of SGLang's own classes, in the scheduler's process and once a linker runs.

A linker cannot answer "not yet": SGLang would compute a prompt while the disk reads its prefix. So
FlexKV hides such a request from the scheduler until the blocks are in host memory. SGLang schedules
other requests meanwhile. It does the same for its own storage backends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from flexkv.adapter.cost import Span
from flexkv.adapter.guard import Edge
from flexkv_sglang.kv_events import follow
from flexkv_sglang.side import RankSide

logger = logging.getLogger("flexkv.sglang")

_LOOKAHEAD = 64
"""Waiting requests that are looked up ahead of their turn, so that disks read for them while others
compute. Chosen to be more than a batch of prompts and to cost a step little; not tuned."""

_REST_SECONDS = 0.001
"""How long SGLang's loop sleeps if all requests wait for lower tiers. Without the sleep the loop
keeps Python's lock, and each step of the reading threads waits 5 ms for it. vLLM's loop sleeps as
long."""

_ADMISSION = "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw"
_OFFLOAD = (
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
    "._offload_node"
)
_EVENTS = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.take_events"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES = ("disk", "distributed", "tensor", "ipc")

_sides: list[RankSide] = []
_edge = Edge()


def serve(side: RankSide) -> None:
    """Hook SGLang's classes to this side. The first call replaces the methods; they stay replaced.
    The side is borrowed until `leave`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not _sides:
        HookRegistry.register(_ADMISSION, schedule, HookType.AROUND)
        HookRegistry.register(_OFFLOAD, offload, HookType.AROUND)
        HookRegistry.register(_EVENTS, take_events, HookType.AROUND)
        for source in _UPDATES:
            name = f"{_UPDATER}.update_weights_from_{source}"
            HookRegistry.register(name, update_weights, HookType.AROUND)
        HookRegistry.apply_hooks()
    _sides.append(side)


def leave(side: RankSide) -> None:
    """Unhook this side. Idempotent."""
    if side in _sides:
        _sides.remove(side)


def schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of SGLang's choice of prompts to compute: hide those that wait for a lower tier."""
    side = next(iter(_sides), None)
    if side is None:
        return original(scheduler, *args, **kwargs)
    made = _schedule_ready(side, original, scheduler, *args, **kwargs)
    batch, _ = made
    requests = () if batch is None else batch.reqs
    if requests:
        with _edge.guard("counting a batch", "its queries are not counted"):
            waiting = [each.rid for each in scheduler.waiting_queue]
            side.scheduled([each.rid for each in requests], waiting)
    if side.records:
        with _edge.guard("recording a batch", "its requests are not in the trace"):
            side.record_batch(requests)
    if scheduler.device == "cpu":
        # Elsewhere SGLang prepares the next step before this one has ended: its time is unknown.
        with _edge.guard("measuring a batch", "its time is not known"):
            side.batch_begins([Span(each.prefix_len, each.extend_end) for each in requests])
    return made


def _schedule_ready(
    side: RankSide, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    if not side.may_wait:
        return original(scheduler, *args, **kwargs)
    queue = scheduler.waiting_queue
    _look_ahead(side, scheduler)
    # Not guarded: ranks agree here, and a rank that skipped it would mistake the next answer.
    held = side.held([request.rid for request in queue])
    if not any(held):
        return original(scheduler, *args, **kwargs)
    waiting = {id(request) for request, waits in zip(queue, held, strict=True) if waits}
    scheduler.waiting_queue = [each for each in queue if id(each) not in waiting]
    try:
        made = original(scheduler, *args, **kwargs)
    finally:
        left = {id(request) for request in scheduler.waiting_queue}
        known = {id(request) for request in queue}
        # In SGLang's order; requests that SGLang has put back come last, as in its own queue.
        scheduler.waiting_queue = [
            *(each for each in queue if id(each) in waiting or id(each) in left),
            *(each for each in scheduler.waiting_queue if id(each) not in known),
        ]
    batch, running = made
    if batch is None and running.is_empty() and scheduler.last_batch is None:
        time.sleep(_REST_SECONDS)
    return made


def offload(original: Callable[..., Any], wrapper: Any, node: Any, transfers: Any) -> Any:
    """Hook of SGLang's offload of a tree node's pages: report the page that they follow."""
    for side in _sides:
        with _edge.guard("following the tree", "blocks may outlive those that they build on"):
            if side.leads:
                prefix = wrapper.cache.get_prefix_hash_values(node)
                side.builds_on(prefix[-1] if prefix else None)
    return original(wrapper, node, transfers)


def take_events(original: Callable[..., Any], tree: Any) -> Any:
    """Hook of SGLang's publication of its tree's events: append FlexKV's events."""
    events = original(tree)
    for side in _sides:
        with _edge.guard("telling KV events", "they are lost"):
            if side.events is not None:
                return follow(events, side.events, tree.page_size)
    return events


def update_weights(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of SGLang's updates of weights. All stored blocks belong to the old weights afterwards,
    also if the update fails."""
    try:
        return original(updater, *args, **kwargs)
    finally:
        for side in _sides:
            side.weights_changed()


def _look_ahead(side: RankSide, scheduler: Any) -> None:
    """Look up new requests of the queue, which begins their fetches.

    Each lookup has its own guard: ranks agree on each, so a failed one must not skip the others.
    """
    for request in scheduler.waiting_queue[:_LOOKAHEAD]:
        with _edge.guard("looking ahead", "a request is looked up when it is its turn"):
            if side.is_new(request.rid):
                request.init_next_round_input(scheduler.tree_cache, cow_mamba=False)
