# SPDX-License-Identifier: Apache-2.0
"""What an engine without any connector answers, and the comparison with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.harness.answers import Completion
from integration.harness.checkpoint import TINY
from integration.harness.config import EngineConfig
from integration.harness.plain_engine import Generates
from integration.tests import corpus
from integration.tests.corpus import Tokens

# Largest difference of a log probability that comes from the order of float32 additions alone:
# 2.4e-5 over batch sizes, chunk sizes, preemptions and TP=2. A zeroed row of one token in one layer
# out of 3,000 tokens differs by more than this in 14 of 15 cases, a wrong block always.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: all that came before is part of the prompt."""

    prompt: Tokens
    answer: Completion


class Reference:
    """Answers of plain vLLM: every prompt alone, cold, with its prefix cache off.

    Args:
        answers: to all prompts of the corpus, by prompt and number of new tokens.
    """

    def __init__(self, answers: Mapping[tuple[Tokens, int], Completion]) -> None:
        self._answers = answers
        self.turns = list(_turns(self.of))

    @classmethod
    def asked(cls, engine: Generates) -> Reference:
        """The answers of `engine`."""
        answers: dict[tuple[Tokens, int], Completion] = {}

        def ask(prompt: Tokens, new_tokens: int = corpus.NEW_TOKENS) -> Completion:
            answer = engine.generate(prompt, max_tokens=new_tokens, logprobs=True)
            assert answer.cached_tokens == 0
            answers[prompt, new_tokens] = answer
            return answer

        for prompt in corpus.SINGLE:
            ask(prompt)
        for prompt in corpus.PREEMPTED:
            ask(prompt, corpus.PREEMPTED_NEW_TOKENS)
        for _ in _turns(ask):
            pass
        return cls(answers)

    def of(self, prompt: Sequence[int], new_tokens: int = corpus.NEW_TOKENS) -> Completion:
        """The answer to a prompt of the corpus; KeyError for any other."""
        return self._answers[tuple(prompt), new_tokens]

    def check(
        self,
        prompt: Sequence[int],
        answer: Completion,
        new_tokens: int = corpus.NEW_TOKENS,
        what: str = "",
    ) -> None:
        """Assert that ``answer`` is what plain vLLM answers."""
        check_equal(answer, self.of(prompt, new_tokens), f"{what} (prompt of {len(prompt)})")

    def check_all(
        self,
        prompts: Iterable[Sequence[int]],
        answers: Iterable[Completion],
        new_tokens: int = corpus.NEW_TOKENS,
        what: str = "",
    ) -> None:
        """``check`` for many."""
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            self.check(prompt, answer, new_tokens, f"{what} number {number}")


def _turns(answer: Callable[[Tokens], Completion]) -> Iterator[Turn]:
    """The conversation of the corpus."""
    history: Tokens = ()
    for said in corpus.TURNS:
        prompt = history + said
        turn = Turn(prompt, answer(prompt))
        yield turn
        history = prompt + tuple(turn.answer.tokens)


def check_equal(answer: Completion, expected: Completion, what: str) -> None:
    """Assert equal tokens, and log probabilities that differ by rounding only."""
    assert answer.finish_reason == expected.finish_reason == "length", what
    assert answer.tokens == expected.tokens, what
    differences = [abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True)]
    # Written so that a NaN fails.
    assert all(difference <= LOGPROB_TOLERANCE for difference in differences), (what, differences)


def differs(answer: Completion, expected: Completion) -> bool:
    """Whether the tokens differ; for the tests that must see a difference."""
    return answer.tokens != expected.tokens


def plain_config(model: Path) -> EngineConfig:
    """The engine that gives the reference."""
    return EngineConfig(
        model=model,
        dtype=TINY.dtype,
        block_size=corpus.ENGINE_BLOCK,
        max_num_batched_tokens=8192,
        kv_cache_bytes=64 << 20,
        prefix_caching=False,
        forked=True,
    )
