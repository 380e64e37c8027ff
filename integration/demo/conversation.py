# SPDX-License-Identifier: Apache-2.0
"""Holds the conversations with one engine and notes what each turn took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from integration.demo.chat import Exchange
from integration.demo.engines import Setup
from integration.harness.engine import Engine

# Enough to bring every kernel of the engine to its working state before a clock runs.
WARM_UP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and answer.

    Attributes:
        number: of the turn, from 1; every user has one of each number.
        prompt_tokens: tokens of the conversation up to the question.
        cached_tokens: those of them that were not computed, from whichever cache they came.
        ttft: seconds to the first token of the answer.
        seconds: seconds to the last one.
        tokens: token ids as generated.
    """

    number: int
    user: str
    prompt_tokens: int
    cached_tokens: int
    ttft: float
    seconds: float
    tokens: list[int]


def converse(engine: Engine, setup: Setup) -> Iterator[Turn]:
    """Let the users take turns; yields each turn when its answer is complete.

    Every prompt holds the answers that this very engine gave before. A first, short request with a
    text of its own is not counted: it only warms the engine up.
    """
    chat, plan = setup.model.chat, setup.plan
    length = min(WARM_UP_TOKENS, plan.conversation_tokens // 2)
    warm_up = chat.prompt([], "Hello! " * length)[:length]
    engine.generate(warm_up, max_tokens=4)
    past: dict[str, list[Exchange]] = {user: [] for user in plan.questions}
    for index in range(plan.turns):
        for user, questions in plan.questions.items():
            question = questions[index]
            prompt = chat.prompt(past[user], question)
            done = engine.generate(
                prompt, max_tokens=plan.answer_tokens, ignore_eos=setup.model.random
            )
            past[user].append(Exchange(question, chat.answer(done.tokens)))
            yield Turn(
                number=index + 1,
                user=user,
                prompt_tokens=len(prompt),
                cached_tokens=done.cached_tokens or 0,
                ttft=done.ttft,
                seconds=done.times[-1],
                tokens=done.tokens,
            )
