# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal when 16 requests share the engine, and prefixes with one another."""

from __future__ import annotations

from integration.harness.engine import Engine
from integration.tests.corpus import CONCURRENT, PREFIX, WARM
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, ask_together, external_hits, whole_blocks


def test_sixteen_at_once(engine: Engine, reference: Reference) -> None:
    assert len(CONCURRENT) == 16
    reference.check_all(CONCURRENT, ask_together(engine, CONCURRENT), what="cold")
    engine.forget()
    before = external_hits(engine)
    warm = ask_together(engine, CONCURRENT)
    reference.check_all(CONCURRENT, warm, what="warm")
    assert [answer.cached_tokens for answer in warm] == [
        whole_blocks(len(prompt)) for prompt in CONCURRENT
    ]
    assert external_hits(engine) > before


def test_loads_beside_computing(engine: Engine, reference: Reference) -> None:
    """Half of the prompts are known: they are loaded while the others are computed and stored."""
    known, unknown = CONCURRENT[:8], CONCURRENT[8:]
    ask_each(engine, known)
    engine.forget()
    mixed = [prompt for pair in zip(known, unknown, strict=True) for prompt in pair]
    answers = ask_together(engine, mixed)
    reference.check_all(mixed, answers, what="mixed")
    assert [answer.cached_tokens for answer in answers[::2]] == [
        whole_blocks(len(prompt)) for prompt in known
    ]


def test_the_same_prompt_sixteen_times(engine: Engine, reference: Reference) -> None:
    """Nothing is known at first, so all of them want to store the same blocks."""
    prompts = [PREFIX] * 16
    reference.check_all(prompts, ask_together(engine, prompts), what="cold")
    engine.forget()
    warm = ask_together(engine, prompts)
    reference.check_all(prompts, warm, what="warm")
    assert all(answer.cached_tokens for answer in warm)


def test_a_hit_while_others_decode(engine: Engine, reference: Reference) -> None:
    """Requests that decode go on during a load, and neither disturbs the other."""
    ask_each(engine, WARM)
    engine.forget()
    busy = [engine.submit(prompt, max_tokens=400) for prompt in CONCURRENT[8:12]]
    for generation in busy:
        generation.wait_first_token()
    warm = ask_each(engine, WARM)
    reference.check_all(WARM, warm, what="warm")
    assert [answer.cached_tokens for answer in warm] == [whole_blocks(len(p)) for p in WARM]
    for prompt, generation in zip(CONCURRENT[8:12], busy, strict=True):
        expected = reference.of(prompt).tokens
        assert generation.result().tokens[: len(expected)] == expected
