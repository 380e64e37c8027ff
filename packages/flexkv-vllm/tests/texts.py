# SPDX-License-Identifier: Apache-2.0
"""What requests of the engine without a model say."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from world_config import LLAMA


class Text:
    """A request's tokens: its prompt, and what the runner makes of it, as far as it was asked."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.sampled = 0
        self._digest = hashlib.blake2b(repr(prompt).encode(), digest_size=4)

    def upto(self, count: int) -> list[int]:
        return self.between(0, count)

    def between(self, start: int, stop: int) -> list[int]:
        """Its tokens from `start` on, before `stop`. Copies no others: a long text would drive
        what benchmarks measure out of the processor's caches."""
        while len(self.tokens) < stop:
            self._digest.update(self.tokens[-1].to_bytes(4, "little"))
            number = int.from_bytes(self._digest.digest(), "little")
            self.tokens.append(number % LLAMA["vocab_size"])
        return self.tokens[start:stop]

    def sample(self, computed: int, guesses: Sequence[int] = ()) -> list[int]:
        """The next token, if `computed` tokens are all that there are so far; and before it those
        of `guesses`, the last of what was computed, that are right."""
        known = computed - len(guesses)
        if known < self.prompt_tokens + self.sampled:
            return []
        right = self.between(known, computed)
        accepted = next((i for i, each in enumerate(guesses) if each != right[i]), len(guesses))
        self.sampled += accepted + 1
        return self.between(known, known + accepted + 1)

    def guess(self, rng: random.Random, count: int) -> list[int]:
        """What a draft model might say comes next: the more distant, the more often wrong."""
        known = self.prompt_tokens + self.sampled
        guesses = self.between(known, known + count)
        for i in range(rng.randint(0, count), count):
            guesses[i] = rng.randrange(LLAMA["vocab_size"])
        return guesses
