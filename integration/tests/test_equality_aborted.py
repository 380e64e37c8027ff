# SPDX-License-Identifier: Apache-2.0
"""Requests are aborted before, during and after a load; the others and the engine go on."""

from __future__ import annotations

from integration.harness.engine import Engine
from integration.tests.corpus import ABORTED, NEW_TOKENS, WARM
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, ask_together, have_told, whole_blocks

# Delays in seconds around the time that a load of these prompts takes: some milliseconds, or some
# ten on a slow machine.
DELAYS = [0.0005 * step for step in (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 26, 32, 40, 60)]


def test_aborts_during_loads(engine: Engine, reference: Reference) -> None:
    reference.check_all(ABORTED, ask_each(engine, ABORTED), what="storing")
    ask_each(engine, WARM)
    engine.forget()
    hits_possible = [whole_blocks(len(prompt)) for prompt in ABORTED]

    outcomes: set[str | None] = set()
    for delay in DELAYS:
        aborted = [
            engine.submit(prompt, max_tokens=NEW_TOKENS, abort_after=delay) for prompt in ABORTED
        ]
        survivors = ask_together(engine, WARM)
        reference.check_all(WARM, survivors, what=f"beside aborts after {delay} s")
        outcomes |= {generation.result().finish_reason for generation in aborted}
        # Succeeds only if no block is held by anyone.
        engine.forget()
    assert "abort" in outcomes

    have_told(engine)
    assert engine.counter("vllm:num_requests_running") == 0
    assert engine.counter("vllm:num_requests_waiting") == 0
    assert engine.counter("vllm:kv_cache_usage_perc") == 0
    warm = ask_each(engine, ABORTED)
    reference.check_all(ABORTED, warm, what="after the aborts")
    assert [answer.cached_tokens for answer in warm] == hits_possible


def test_aborts_while_computing(engine: Engine, reference: Reference) -> None:
    """Blocks that are being stored stay what they are until the store is done."""
    for delay in DELAYS[::4]:
        aborted = [
            engine.submit(prompt, max_tokens=NEW_TOKENS, abort_after=10 * delay)
            for prompt in ABORTED
        ]
        reference.check_all(WARM, ask_together(engine, WARM), what="beside aborts")
        for generation in aborted:
            generation.result()
        engine.forget()
        reference.check_all(ABORTED, ask_each(engine, ABORTED), what="over what they stored")
        engine.reset_prefix_cache(reset_connector=True)
