# SPDX-License-Identifier: Apache-2.0
"""What FlexKV's policy finds if clients name their conversations, say when these end, and ask for
their blocks to be kept until the next turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexkv.eviction import RequestContext
from flexkv.index.block_index import block_index
from flexkv.index.pins import HostPins
from flexkv.plan.replayer import conversations
from flexkv.plan.trace import Trace
from flexkv_kernels.hazard import HazardPolicy
from integration.bench.rows import Goal, Row

SIZES = (1_000, 2_000, 5_000)

_RETAIN_SECONDS = 300.0
"""The default `ttl` of a prompt cache in the interfaces of several providers: five minutes."""

_OWNER = "the only tenant"


def hint_rows(traces: Sequence[Trace], say: Callable[[str], None]) -> list[Row]:
    """A row for each trace and size: the hits with hints, beside those without.

    Args:
        traces: recorded traces. Requests that share more than what many do are a conversation.
        say: where to report progress.
    """
    rows = []
    for trace in traces:
        groups = conversations(trace)
        blocks = sum(len(each.blocks) for each in trace.requests)
        for size in SIZES:
            say(f"{trace.name} with the ends of {len(set(groups))} conversations, {size} blocks")
            without, ends, named, retained = (
                _hits(trace, size, groups, ends=ends, names=names, retains=retains) / blocks
                for ends, names, retains in (
                    (False, False, False),
                    (True, False, False),
                    (True, True, False),
                    (True, False, True),
                )
            )
            rows.append(
                Row(
                    f"{trace.name} with ends of conversations, {size:,} blocks",
                    ends,
                    "of blocks",
                    Goal(">=", without),
                    f"without {without:.4f}, with names, too, {named:.4f}, with retention, too, "
                    f"{retained:.4f}",
                )
            )
    return rows


def _hits(
    trace: Trace, size: int, groups: Sequence[int], *, ends: bool, names: bool, retains: bool
) -> int:
    """Blocks that requests find in a memory of `size` blocks.

    Args:
        trace: the trace.
        size: blocks of memory.
        groups: the number of each request's conversation.
        ends: whether the last request of a conversation says that it is.
        names: whether each request names its conversation.
        retains: whether each request asks for its blocks to be kept for `_RETAIN_SECONDS`; the last
            one of a conversation releases them.
    """
    policy = HazardPolicy(size)
    index = block_index(size, policy)
    pins = HostPins(index, _RETAIN_SECONDS)
    keys = [number.to_bytes(8, "little") for number in range(trace.distinct_blocks)]
    last = {group: number for number, group in enumerate(groups)}
    for number, (request, group) in enumerate(zip(trace.requests, groups, strict=True)):
        prompt = [keys[block] for block in request.blocks]
        context = RequestContext(
            request.prompt_tokens,
            request_id=str(number),
            session=str(group) if names else "",
            returns=False if ends and last[group] == number else None,
        )
        pins.expire(request.seconds)
        index.began(prompt, context, request.seconds)
        index.publish(index.reserve_all(prompt, range(len(prompt)), (0,)))
        index.touch(prompt)
        index.ended(context.request_id, request.output_tokens, request.seconds)
        if retains and last[group] == number:
            pins.release(prompt, _OWNER)
        elif retains:
            pins.retain(prompt, _OWNER, _RETAIN_SECONDS, request.seconds)
    state = policy.guard_state()
    assert state is not None
    return state.hits
