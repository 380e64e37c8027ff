# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal over blocks that left host memory and come back from disk."""

from __future__ import annotations

import operator

from integration.harness.engine import Engine
from integration.tests.corpus import (
    ABORTED,
    CONCURRENT,
    EVICTED,
    FLEXKV_BLOCK,
    LONG,
    NEW_TOKENS,
    WARM,
)
from integration.tests.disks import SLOTS, ask_and_settle, restorable, restored
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, ask_together, external_hits, have_told

ROTATION = ABORTED + EVICTED + LONG
# Delays in seconds around the time that the disk takes for one of these prompts (10 ms), fine
# enough that some aborts fall into it whatever the machine.
DELAYS = [0.001 * step for step in range(24)]

BUSY_TOKENS = 600


def _leave_host_memory(engine: Engine) -> None:
    """Ask for so much else that nothing that was known before is in memory any more."""
    ask_and_settle(engine, ABORTED)
    engine.forget()


def test_what_left_host_memory_comes_back(disk_engine: Engine, reference: Reference) -> None:
    """Prompts in rotation, of which host memory holds less than half at any time."""
    expected = restorable(ROTATION)
    assert sum(expected) > 2 * SLOTS * FLEXKV_BLOCK
    reference.check_all(ROTATION, ask_and_settle(disk_engine, ROTATION), what="cold")
    for what in ("warm", "warm again"):
        disk_engine.forget()
        before = external_hits(disk_engine)
        # A block that is still being written keeps its place in host memory, which a fetch needs.
        warm = ask_and_settle(disk_engine, ROTATION)
        reference.check_all(ROTATION, warm, what=what)
        assert restored(warm) == expected, what
        assert external_hits(disk_engine) - before == sum(expected), what


def test_a_disk_hit_while_others_compute(disk_engine: Engine, reference: Reference) -> None:
    """Requests that compute go on while the disk reads, and neither disturbs the other: some hits
    come with them, some while they decode."""
    known, computed = EVICTED[:6], CONCURRENT[8:12]
    ask_and_settle(disk_engine, known)
    _leave_host_memory(disk_engine)
    busy = [disk_engine.submit(prompt, max_tokens=BUSY_TOKENS) for prompt in computed]
    warm = ask_together(disk_engine, known[:2])
    for generation in busy:
        generation.wait_first_token()
    warm += ask_each(disk_engine, known[2:])
    reference.check_all(known, warm, what="warm")
    assert restored(warm) == restorable(known)
    for prompt, generation in zip(computed, busy, strict=True):
        expected = reference.of(prompt).tokens
        assert generation.result().tokens[: len(expected)] == expected


def test_sixteen_requests_share_a_prefix_on_disk(disk_engine: Engine, reference: Reference) -> None:
    """All of them want the same blocks, and wait for the same reads. Those that come last may find
    even more in vLLM's own cache, which counts smaller blocks."""
    prompts = CONCURRENT[-4:] * 4
    expected = restorable(prompts)
    ask_and_settle(disk_engine, CONCURRENT)
    for what in ("from disk", "from disk again"):
        _leave_host_memory(disk_engine)
        warm = ask_together(disk_engine, prompts)
        reference.check_all(prompts, warm, what=what)
        assert all(map(operator.ge, restored(warm), expected)), what


def test_sixteen_prefixes_at_once(disk_engine: Engine, reference: Reference) -> None:
    """Together they fill most of host memory."""
    ask_and_settle(disk_engine, CONCURRENT)
    _leave_host_memory(disk_engine)
    warm = ask_together(disk_engine, CONCURRENT)
    reference.check_all(CONCURRENT, warm, what="warm")
    assert all(map(operator.ge, restored(warm), restorable(CONCURRENT)))


def test_aborts_while_the_disk_reads(disk_engine: Engine, reference: Reference) -> None:
    ask_and_settle(disk_engine, ABORTED + WARM)
    disk_engine.forget()
    outcomes: set[str | None] = set()
    for number, delay in enumerate(DELAYS):
        # Host memory holds two of these prompts, and the last two were others.
        prompt = ABORTED[number % len(ABORTED)]
        aborted = disk_engine.submit(prompt, max_tokens=NEW_TOKENS, abort_after=delay)
        reference.check_all(WARM, ask_together(disk_engine, WARM), what=f"abort after {delay} s")
        outcomes.add(aborted.result().finish_reason)
        # Succeeds only if no block is held by anyone.
        disk_engine.forget()
    assert "abort" in outcomes

    have_told(disk_engine)
    assert disk_engine.counter("vllm:num_requests_running") == 0
    assert disk_engine.counter("vllm:num_requests_waiting") == 0
    warm = ask_each(disk_engine, ABORTED)
    reference.check_all(ABORTED, warm, what="after the aborts")
    assert restored(warm) == restorable(ABORTED)
