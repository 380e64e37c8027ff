# SPDX-License-Identifier: Apache-2.0
"""Holds the conversations with one engine and notes what each turn took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from integration.demo import load
from integration.demo.chat import Exchange
from integration.demo.engines import Setup
from integration.demo.serving import Serving

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
        others: the share of the cores, from 0 to 1, that other processes took meanwhile.
    """

    number: int
    user: str
    prompt_tokens: int
    cached_tokens: int
    ttft: float
    seconds: float
    tokens: list[int]
    others: float = 0.0


class Conversations:
    """What all users and the engines of one run have said to each other."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._past: dict[str, list[Exchange]] = {user: [] for user in setup.plan.questions}

    def turns(self, engine: Serving) -> Iterator[Turn]:
        """Let the users take turns; yields each turn when its answer is complete.

        Every prompt holds the answers that this very engine gave before.
        """
        self._warm_up(engine, "Hello! ")
        for index in range(self._setup.plan.turns):
            for user, questions in self._setup.plan.questions.items():
                turn, answer = self._ask(engine, user, questions[index])
                self._past[user].append(Exchange(questions[index], answer))
                yield turn

    def last_turns_again(self, engine: Serving) -> Iterator[Turn]:
        """Let every user ask the last question once more, of another engine."""
        self._warm_up(engine, "Welcome back! ")
        for user, past in self._past.items():
            last = past.pop()
            turn, answer = self._ask(engine, user, last.question)
            past.append(Exchange(last.question, answer))
            yield turn

    def _warm_up(self, engine: Serving, text: str) -> None:
        """A short request with a text that no engine has had, which is not counted."""
        length = min(WARM_UP_TOKENS, self._setup.plan.conversation_tokens // 2)
        engine.generate(self._setup.model.chat.prompt([], text * length)[:length], max_tokens=4)

    def _ask(self, engine: Serving, user: str, question: str) -> tuple[Turn, list[int]]:
        """The turn, and the tokens of its answer."""
        model, past = self._setup.model, self._past[user]
        prompt = model.chat.prompt(past, question)
        before = load.look()
        done = engine.generate(
            prompt, max_tokens=self._setup.plan.answer_tokens, ignore_eos=model.random
        )
        turn = Turn(
            number=len(past) + 1,
            user=user,
            prompt_tokens=len(prompt),
            cached_tokens=done.cached_tokens or 0,
            ttft=done.ttft,
            seconds=done.times[-1],
            tokens=done.tokens,
            others=load.others_share(before, load.look()),
        )
        return turn, model.chat.answer(done.tokens)
