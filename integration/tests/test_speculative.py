# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: what is accepted is cached; what is guessed and rejected was computed, too,
and must not be.

The engine guesses from n-grams of the context. The random model's answers hardly ever repeat one,
so that most guesses are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.corpus import NEW_TOKENS, PREEMPTED, PREEMPTED_NEW_TOKENS, Tokens
from integration.tests.reference import Reference
from integration.tests.steps import whole_blocks

GUESSES: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module", params=["async", "layerwise"])
def load_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def guessing_engine(
    load_mode: str,
    host: EngineHost,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    config = engine_config(
        connector.plugin(**flexkv(load_mode=load_mode)),
        async_scheduling=None if load_mode == "async" else False,
        extra_args={"speculative_config": GUESSES},
    )
    engine = host.get(config)
    engine.reset_prefix_cache(reset_connector=True)
    return engine


def rejected(engine: Engine) -> float:
    """Guesses so far that were wrong."""
    guessed = engine.counter("vllm:spec_decode_num_draft_tokens")
    return guessed - engine.counter("vllm:spec_decode_num_accepted_tokens")


def check(engine: Engine, reference: Reference, prompts: Sequence[Tokens]) -> list[int]:
    """All at once, with the answers of plain vLLM; the cached tokens of each."""
    answers = engine.generate_many(prompts, max_tokens=PREEMPTED_NEW_TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == reference.of(prompt, PREEMPTED_NEW_TOKENS).tokens
    return [answer.cached_tokens or 0 for answer in answers]


def test_cold_and_warm(guessing_engine: Engine, reference: Reference) -> None:
    before = rejected(guessing_engine)
    assert check(guessing_engine, reference, PREEMPTED) == [0] * len(PREEMPTED)
    assert rejected(guessing_engine) > before, "nothing was guessed: this shows nothing"
    guessing_engine.forget()
    warm = check(guessing_engine, reference, PREEMPTED)
    assert warm == [whole_blocks(len(prompt)) for prompt in PREEMPTED]


def test_the_next_turn_hits_what_was_accepted(
    guessing_engine: Engine, reference: Reference
) -> None:
    before = rejected(guessing_engine)
    hits = 0
    previous: Tokens = ()
    for turn in reference.turns:
        answer = guessing_engine.generate(turn.prompt, max_tokens=NEW_TOKENS)
        assert answer.tokens == turn.answer.tokens
        # What an answer's last step fills is not stored: one token and the guesses of one step.
        most = len(previous) + NEW_TOKENS - 1 if previous else 0
        least = max(0, most - GUESSES["num_speculative_tokens"])
        assert whole_blocks(least) <= (answer.cached_tokens or 0) <= whole_blocks(most)
        hits += (answer.cached_tokens or 0) > whole_blocks(len(previous))
        previous = turn.prompt
        guessing_engine.forget()
    assert rejected(guessing_engine) > before, "nothing was guessed: this shows nothing"
    assert hits > 0, "no answer fills a block: this shows nothing"
