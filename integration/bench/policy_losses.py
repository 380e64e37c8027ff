# SPDX-License-Identifier: Apache-2.0
"""What FlexKV's policy finds beside LRU, on every trace and workload and at every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flexkv.eviction import RequestContext
from flexkv.index.block_index import block_index
from flexkv.plan.trace import Trace
from flexkv_kernels.hazard import HazardPolicy
from integration.bench.policy_workloads import WORKLOADS
from integration.bench.rows import Goal, Row
from integration.bench.workloads import agents, loop, moving_set, returning_chats

SIZES = (300, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
SEEDS = 3
_LARGE = 1_000
"""From so many blocks on, a hundredth of LRU's hits may be lost; below, three hundredths."""
_LARGE_GOAL, _SMALL_GOAL = 0.99, 0.97
_FEW_HITS = 0.01
"""Of all blocks. Where LRU finds fewer, a ratio says nothing."""


def loss_rows(traces: Sequence[Trace], say: Callable[[str], None]) -> list[Row]:
    """A row for each trace and workload: the least hits in comparison to LRU's of all seeds and
    sizes of at least 1,000 blocks; and one row for the smaller sizes of all.

    Args:
        traces: recorded traces. The first is replayed with all requests at one time, too.
        say: where to report progress.
    """
    rows: list[Row] = []
    small: list[tuple[float, str]] = []

    def add(name: str, samples: Sequence[Trace]) -> None:
        by_size: dict[int, list[float]] = {}
        for trace in samples:
            say(f"{name}: {len(trace.requests)} requests, {trace.blocks} blocks")
            for size in SIZES:
                hits, lru = hits_beside_lru(trace, size)
                if lru > _FEW_HITS * trace.blocks:
                    by_size.setdefault(size, []).append(hits / lru)
        small.extend((each, name) for each in by_size.get(SIZES[0], ()))
        large = [each for size, of_size in by_size.items() if size >= _LARGE for each in of_size]
        means = [f"{size:,}: {sum(each) / len(each):.3f}" for size, each in by_size.items()]
        if large:
            goal = Goal(">=", _LARGE_GOAL)
            rows.append(Row(f"{name}, least", min(large), "of LRU's hits", goal, ", ".join(means)))

    for trace in traces:
        add(trace.name, [trace])
    for trace in traces[:1]:
        still = [replace(each, seconds=0.0) for each in trace.requests]
        add(f"{trace.name}, all at one time", [replace(trace, requests=still)])
    for made in (returning_chats(), agents(), loop(), moving_set()):
        add(made.name, [made])
    for make in WORKLOADS:
        samples = [make(seed) for seed in range(SEEDS)]
        add(samples[0].name, samples)
    worst, name = min(small, default=(1.0, "none"))
    goal = Goal(">=", _SMALL_GOAL)
    rows.append(Row(f"{SIZES[0]} blocks, least", worst, "of LRU's hits", goal, name))
    return rows


def hits_beside_lru(trace: Trace, size: int) -> tuple[int, int]:
    """The blocks that requests find with FlexKV's policy, and with LRU, in a memory of `size`
    blocks. The guard counts both in one replay."""
    policy = HazardPolicy(size)
    index = block_index(size, policy)
    keys = [number.to_bytes(8, "little") for number in range(trace.distinct_blocks)]
    for number, request in enumerate(trace.requests):
        prompt = [keys[block] for block in request.blocks]
        context = RequestContext(request.prompt_tokens, request_id=str(number))
        index.began(prompt, context, request.seconds)
        index.publish(index.reserve_all(prompt, range(len(prompt)), (0,)))
        index.ended(context.request_id, request.output_tokens, request.seconds)
    state = policy.guard_state()
    assert state is not None
    return state.hits, state.lru_hits
