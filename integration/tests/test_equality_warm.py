# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal over restored prefixes: whole prompts, long prompts, conversations."""

from __future__ import annotations

import pytest

from integration.harness.engine import Engine
from integration.tests import corpus
from integration.tests.corpus import LONG, NEW_TOKENS, WARM, Tokens
from integration.tests.reference import Reference, check_equal
from integration.tests.steps import ask, ask_each, external_hits, whole_blocks


@pytest.mark.parametrize(
    "prompts", [pytest.param(WARM, id="one step"), pytest.param(LONG, id="many steps")]
)
def test_warm_after_a_reset(
    engine: Engine, reference: Reference, prompts: tuple[Tokens, ...]
) -> None:
    cold = ask_each(engine, prompts)
    assert [answer.cached_tokens for answer in cold] == [0] * len(prompts)
    reference.check_all(prompts, cold, what="cold")

    engine.forget()
    before = external_hits(engine)
    warm = ask_each(engine, prompts)
    reference.check_all(prompts, warm, what="warm")
    restored = [whole_blocks(len(prompt)) for prompt in prompts]
    assert [answer.cached_tokens for answer in warm] == restored
    assert external_hits(engine) - before == sum(restored)


@pytest.mark.golden  # this test is why such a run asks for the reference
def test_the_engines_own_hits_stay_equal(engine: Engine, reference: Reference) -> None:
    """What vLLM has in its own prefix cache is not loaded again.

    vLLM itself never takes a prompt's last token from its cache, and so leaves out the last block
    of a prompt that ends with one. Those are left out here: FlexKV may add that block.
    """
    prompts = [prompt for prompt in WARM if len(prompt) % corpus.ENGINE_BLOCK]
    assert prompts
    reference.check_all(prompts, ask_each(engine, prompts), what="cold")
    before = external_hits(engine)
    warm = ask_each(engine, prompts)
    reference.check_all(prompts, warm, what="own hit")
    assert [answer.cached_tokens for answer in warm] == [
        whole_blocks(len(prompt), corpus.ENGINE_BLOCK) for prompt in prompts
    ]
    assert external_hits(engine) == before


def test_a_conversation(engine: Engine, reference: Reference) -> None:
    """Every turn finds all that was said before, the engine's own answers included."""
    stored = 0
    for number, turn in enumerate(reference.turns):
        answer = ask(engine, turn.prompt)
        check_equal(answer, turn.answer, f"turn {number}")
        assert answer.cached_tokens == stored
        # The last token of an answer is never fed back, so it has no KV.
        stored = whole_blocks(len(turn.prompt) + NEW_TOKENS - 1)
        engine.forget()
    assert stored > whole_blocks(len(reference.turns[-1].prompt)) - corpus.FLEXKV_BLOCK
