# SPDX-License-Identifier: Apache-2.0
"""Hit rates of the eviction policies on traces, beside what is possible; and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

from flexkv.eviction import POLICIES, UNKNOWN_REQUEST, AnyPolicy, RequestContext
from flexkv.index.block_index import block_index
from flexkv.plan.read import read_trace
from flexkv.plan.trace import Trace
from flexkv_kernels.hazard import HazardPolicy
from integration.bench.policy_hints import hint_rows
from integration.bench.policy_losses import loss_rows
from integration.bench.reference_policies.arc import ARCPolicy
from integration.bench.reference_policies.s3fifo import S3FIFOPolicy
from integration.bench.rows import Goal, Row
from integration.bench.workloads import (
    agents,
    hot_system_prompt,
    loop,
    moving_set,
    random_prompts,
    returning_chats,
    scan,
    sudden_change,
)

OURS = "hazard"
_COMPARED: dict[str, Callable[[int], AnyPolicy]] = {
    "lru": POLICIES["lru"],
    "s3fifo": lambda slots: S3FIFOPolicy(),
    "arc": lambda slots: ARCPolicy(),
    OURS: POLICIES[OURS],
}
_GOALS = {2_000: 0.112, 5_000: 0.18, 10_000: 0.246, 20_000: 0.311}
"""On Mooncake's conversation trace, by blocks of memory."""
_TRACE_SIZES = (2_000, 5_000, 10_000, 20_000, 50_000)
_WORKLOADS: tuple[tuple[Callable[[], Trace], int], ...] = (
    (returning_chats, 2_000),
    (hot_system_prompt, 500),
    (scan, 2_000),
    (agents, 1_000),
    (sudden_change, 400),
    (loop, 200),
    (random_prompts, 120),
    (moving_set, 800),
)
_LOSS = 0.02
_MOST_MICROSECONDS = 1.0
_MOST_BYTES = 104.0
_REPEATS = 5


def policy_rows(traces: Sequence[Path], say: Callable[[str], None]) -> list[Row]:
    """The table.

    Args:
        traces: traces in Mooncake's JSONL, the conversation trace first. The goals are of that one.
        say: where to report progress.
    """
    rows = []
    for make, size in _WORKLOADS:
        made = make()
        say(f"{made.name}: {len(made.requests)} requests, {made.blocks} blocks")
        rates = hit_rates(made, size)
        rows.append(_row(made.name, size, rates, max(0.0, rates["lru"] - _LOSS)))
    rows.append(_unseen_row(returning_chats(), 2_000))
    recorded = [read_trace(str(each)).trace for each in traces]
    rows += loss_rows(recorded, say)
    rows += hint_rows(recorded, say)
    if not recorded:
        say("no --trace: Mooncake's conversation trace is left out")
        return [*rows, *_cost_rows(returning_chats(), 2_000)]
    conversation = recorded[0]
    middle = len(conversation.requests) // 2
    first = replace(conversation, requests=conversation.requests[:middle])
    for size in _TRACE_SIZES:
        say(f"{conversation.name}, {size} blocks")
        hits = {name: _hit_blocks(conversation, name, size) for name in _COMPARED}
        early = {name: _hit_blocks(first, name, size) for name in _COMPARED}
        best = belady(conversation, size)
        whole = {name: each / all_blocks(conversation) for name, each in hits.items()}
        late = all_blocks(conversation) - all_blocks(first)
        second = {name: (hits[name] - early[name]) / late for name in _COMPARED}
        bound = max(_GOALS.get(size, 0.0), _best_fixed(whole))
        rows.append(_row("trace", size, whole | {"Belady": best}, bound))
        rows.append(_row("trace, second half", size, second, _best_fixed(second)))
    return [*rows, *_cost_rows(conversation, 10_000)]


def all_blocks(trace: Trace) -> int:
    """Blocks of all prompts, those that the prompt does not fill included."""
    return sum(-(-each.prompt_tokens // trace.block_tokens) for each in trace.requests)


def hit_rates(trace: Trace, size: int) -> dict[str, float]:
    """The share of all blocks that each policy finds with a memory of so many blocks."""
    rates = {name: _hit_blocks(trace, name, size) / all_blocks(trace) for name in _COMPARED}
    return rates | {"Belady": belady(trace, size)}


def _hit_blocks(trace: Trace, policy: str, size: int) -> int:
    """Blocks that requests find, one request after the other."""
    index = block_index(size, _COMPARED[policy](size))
    keys = [number.to_bytes(8, "little") for number in range(trace.distinct_blocks)]
    hits = 0
    for number, request in enumerate(trace.requests):
        prompt = [keys[block] for block in request.blocks]
        most = min(len(prompt), max(0, request.prompt_tokens - 1) // trace.block_tokens)
        found = index.lookup(prompt[:most])
        hits += found
        context = RequestContext(request.prompt_tokens, request_id=str(number))
        index.began(prompt, context, request.seconds)
        index.hit(prompt[:found], context)
        index.publish(index.reserve_all(prompt, range(len(prompt)), (0,)))
        index.touch(prompt)
        index.ended(context.request_id, request.output_tokens, request.seconds)
    return hits


def belady(trace: Trace, size: int) -> float:
    """The share that a cache of this size finds which knows the future: it keeps the blocks that
    are needed soonest, and of those the ones that others build on."""
    coming: dict[int, int] = {}
    later: list[list[float]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        later.append([coming.get(block, inf) for block in blocks])
        coming.update(dict.fromkeys(blocks, number))
    later.reverse()
    there: dict[int, float] = {}
    heap: list[tuple[float, int, int]] = []
    hits = 0
    for request, uses in zip(trace.requests, later, strict=True):
        most = min(len(request.blocks), (request.prompt_tokens - 1) // trace.block_tokens)
        for block in request.blocks[:most]:
            if block not in there:
                break
            hits += 1
        for depth, (block, use) in enumerate(zip(request.blocks, uses, strict=True)):
            there[block] = use
            heappush(heap, (-use, -depth, block))
        while len(there) > size:
            use, _, block = heappop(heap)
            if there.get(block) == -use:
                del there[block]
        if len(heap) > 4 * len(there) + 1024:
            heap = [each for each in heap if there.get(each[2]) == -each[0]]
            heapify(heap)
    return hits / all_blocks(trace)


def _best_fixed(rates: dict[str, float]) -> float:
    return max(rates[name] for name in _COMPARED if name != OURS)


def _row(what: str, size: int, rates: dict[str, float], bound: float) -> Row:
    others = ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items() if name != OURS)
    return Row(f"{what}, {size:,} blocks", rates[OURS], "of blocks", Goal(">=", bound), others)


def _unseen_row(trace: Trace, size: int) -> Row:
    """Where the adapter sees hits, but neither requests nor their answers, as under HiCache."""
    rates = {}
    for name in ("lru", OURS):
        index = block_index(size, POLICIES[name](size))
        hits = 0
        for request in trace.requests:
            prompt = [block.to_bytes(32, "little") for block in request.blocks]
            found = index.lookup(prompt)
            if found:
                index.began(prompt[:found], UNKNOWN_REQUEST, request.seconds)
                index.hit(prompt[:found], UNKNOWN_REQUEST)
            index.publish(index.reserve_all(prompt, range(found, len(prompt)), (0,)))
            hits += found
        rates[name] = hits / all_blocks(trace)
    what = f"{trace.name}, requests unseen, {size:,} blocks"
    return Row(what, rates[OURS], "of blocks", None, f"lru {rates['lru']:.3f}")


@dataclass(slots=True)
class _Recorder:
    """Passes all calls on to a policy, and keeps them."""

    policy: Any
    calls: list[tuple[str, tuple[Any, ...]]]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.policy, name)

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return method(*args)

        return call


def _cost_rows(trace: Trace, size: int) -> Sequence[Row]:
    """What the policy alone costs: the calls of an index, made again without it."""
    recorder: Any = _Recorder(HazardPolicy(size), [])
    index = block_index(size, recorder)
    keys = [number.to_bytes(32, "little") for number in range(trace.distinct_blocks)]
    for number, request in enumerate(trace.requests):
        prompt = [keys[block] for block in request.blocks]
        hits = index.lookup(prompt)
        context = RequestContext(request.prompt_tokens, request_id=str(number))
        index.began(prompt, context, request.seconds)
        index.hit(prompt[:hits], context)
        index.publish(index.reserve_all(prompt, range(hits, len(prompt)), (0,)))
        index.touch(prompt)
        index.ended(str(number), request.output_tokens, request.seconds)
    seconds = []
    taken = learned = 0
    for _ in range(_REPEATS):
        policy = HazardPolicy(size)
        methods = {name: getattr(policy, name) for name, _ in recorder.calls}
        calls = [(methods[name], args) for name, args in recorder.calls]
        began = time.process_time()
        for method, args in calls:
            method(*args)
        seconds.append(time.process_time() - began)
        taken, learned = policy.size_in_bytes()
    cost = min(seconds) / trace.blocks * 1e6
    return [
        Row(
            f"cost of {OURS}, {size:,} blocks",
            cost,
            "us a block",
            Goal("<=", _MOST_MICROSECONDS),
            f"{len(recorder.calls):,} calls for {trace.blocks:,} blocks of {trace.name}, the least "
            f"of {_REPEATS} times, seconds of the processor",
            {OURS: seconds},
        ),
        Row(
            f"memory of {OURS}, {size:,} blocks",
            taken / size,
            "B a block",
            Goal("<=", _MOST_BYTES),
            f"and {learned / 1e6:.1f} MB for what it has learned, however many blocks there are",
        ),
    ]
