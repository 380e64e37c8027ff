# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal when a prompt's prefix is known in part, for every class of lengths."""

from __future__ import annotations

import pytest

from integration.harness.engine import Engine
from integration.tests.corpus import ENGINE_BLOCK, FLEXKV_BLOCK, PARTIAL, PREFIX, Partial
from integration.tests.reference import Reference
from integration.tests.steps import ask, external_hits


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in PARTIAL])
def test_partial_hits(engine: Engine, reference: Reference, case: Partial) -> None:
    reference.check(PREFIX, ask(engine, PREFIX), what="storing")
    engine.forget()
    before = external_hits(engine)
    answer = ask(engine, case.prompt)
    reference.check(case.prompt, answer, what=case.name)
    assert answer.cached_tokens == case.expected_hit
    assert external_hits(engine) - before == case.expected_hit


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in PARTIAL])
def test_a_prompt_stores_its_own_end(engine: Engine, reference: Reference, case: Partial) -> None:
    """What a hit left over is computed, stored, and found the next time."""
    ask(engine, PREFIX)
    engine.forget()
    ask(engine, case.prompt)
    engine.forget()
    answer = ask(engine, case.prompt)
    reference.check(case.prompt, answer, what=case.name)
    assert answer.cached_tokens == len(case.prompt) // FLEXKV_BLOCK * FLEXKV_BLOCK


def test_the_engines_own_hit_ends_inside_a_block(engine: Engine, reference: Reference) -> None:
    """vLLM knows one and a half blocks itself: the rest of the second comes from FlexKV."""
    case = next(case for case in PARTIAL if case.name == "five blocks and 17 tokens")
    ask(engine, PREFIX)
    engine.forget()
    own = FLEXKV_BLOCK + ENGINE_BLOCK
    ask(engine, PREFIX[: own + 5])
    before = external_hits(engine)
    answer = ask(engine, case.prompt)
    reference.check(case.prompt, answer, what=case.name)
    assert answer.cached_tokens == case.expected_hit
    assert external_hits(engine) - before == case.expected_hit - own
