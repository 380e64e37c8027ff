# SPDX-License-Identifier: Apache-2.0
"""The campaign's prompts, and what an engine without FlexKV answers to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from integration.harness.checkpoint import TINY
from integration.harness.prompts import random_tokens

NEW_TOKENS = 32
TEXT_TOKENS = 1500
_TEXTS = 16
_PROMPTS_OF_TEXT = 5
_TAIL_TOKENS = 80
_CLEAR_LEAD = 2e-3
"""How far the log probability of each token of an answer must be above the next best. Batch shapes
move one by some 1e-5 at most: nothing but wrong bytes changes such an answer."""


_AT_ONCE = 4
"""Of a reference, which saves time. Their answers are as clear as those of each alone. The engines'
caches have room for as many of the longest."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the tokens that must follow it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def make_prompts(seed: int) -> list[tuple[int, ...]]:
    """Prompts that share prefixes of all lengths: pieces of a few texts, most with an end of their
    own."""
    rng = random.Random(f"prompts {seed}")
    prompts = []
    for number in range(_TEXTS):
        text = random_tokens(f"campaign {seed} {number}", TEXT_TOKENS, TINY.vocab)
        for part in range(_PROMPTS_OF_TEXT):
            shared = TEXT_TOKENS if part == 0 else rng.randrange(40, TEXT_TOKENS)
            tail = random_tokens(f"{seed} {number} {part}", rng.randrange(_TAIL_TOKENS), TINY.vocab)
            prompts.append((*text[:shared], *tail))
    return prompts


def with_answers(
    prompts: Sequence[tuple[int, ...]],
    answer: Callable[[Sequence[int], int], tuple[list[int], list[float]]],
) -> list[Question]:
    """Each prompt with its answer, but for those whose answer hangs on rounding.

    Args:
        prompts: to ask, `_AT_ONCE` at a time.
        answer: gives so many tokens that follow a prompt, and how far the log probability of each
            is above the next best. Called by several threads.
    """
    questions = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda prompt: answer(prompt, NEW_TOKENS), prompts)
        for prompt, (tokens, leads) in zip(prompts, answers, strict=True):
            if min(leads) > _CLEAR_LEAD:
                questions.append(Question(prompt, tuple(tokens)))
    return questions
