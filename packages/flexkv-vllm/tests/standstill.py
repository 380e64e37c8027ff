# SPDX-License-Identifier: Apache-2.0
"""Stepping an engine until its requests have ended, and what requests wait for that never do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patience import wait_until
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from engine_world import World

DRAINS_HOLDERS = hasattr(Scheduler, "_holds_kv_blocks")
"""Whether this vLLM, 0.31 and newer, first runs what already has blocks. An older one looks no
further than the first request that gets no blocks, although others hold or reserve them: what has
been loaded, or what begins anew because its load has failed. None of them ever runs."""
STILL_STEPS = 1000
"""Steps in a row in which nothing is computed, copied, read or written. The engine then has the
state of the step before, but for reports between the stages: a few steps would do. Not tuned."""


def step_to_end(world: World) -> None:
    """Step until all requests have ended. Where an older vLLM keeps the first from running for
    blocks of those behind it, that one is aborted.

    Raises:
        AssertionError: the engine stands still, or computes for ever. It names what each request
            waits for.
    """
    still = 0

    def step() -> None:
        nonlocal still
        computed = world.computed_seconds
        world.step()
        moves = world.computed_seconds > computed or (world.is_on and world.cache.busy)
        still = 0 if moves else still + 1
        if still == STILL_STEPS and (blocked := _blocked_by_those_behind(world.scheduler)):
            world.abort(blocked)
            still = 0
        assert still < STILL_STEPS, f"the engine stands still: {waits(world.scheduler)}"

    wait_until(world.is_idle, step, lambda: waits(world.scheduler))


def _blocked_by_those_behind(scheduler: Scheduler) -> str | None:
    """The first waiting request, if `DRAINS_HOLDERS` says why it never runs."""
    states = {request.status for request in scheduler.requests.values()}
    if DRAINS_HOLDERS or states - {RequestStatus.WAITING, RequestStatus.PREEMPTED}:
        return None
    queues = [*getattr(scheduler, "skipped_waiting", ()), *scheduler.waiting]
    reserved = getattr(scheduler, "_inflight_prefills", ())
    behind = [each for each in queues[1:] if each.num_computed_tokens or each in reserved]
    return queues[0].request_id if behind else None


def waits(scheduler: Scheduler) -> str:
    """What each request of an engine waits for."""
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return "; ".join(
        f"{request.request_id} ({request.status.name}, {request.num_computed_tokens} of "
        f"{request.num_tokens} tokens computed) waits for {_awaited(request, free)}"
        for request in scheduler.requests.values()
    )


def _awaited(request: Request, free_blocks: int) -> str:
    if request.is_finished():
        return "the release of its blocks"
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        return "its load"
    if request.status is not RequestStatus.RUNNING:
        return f"a step, with {free_blocks} blocks free"
    expected = getattr(request, "num_output_placeholders", 0)
    return f"{expected} tokens of earlier steps" if expected else "its next step"
