# SPDX-License-Identifier: Apache-2.0
"""What requests of the engine without a model say."""

from __future__ import annotations

import hashlib

from world_config import LLAMA


class Text:
    """A request's tokens: its prompt, and what the runner makes of it, as far as it was asked."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.sampled = 0
        self._digest = hashlib.blake2b(repr(prompt).encode(), digest_size=4)

    def upto(self, count: int) -> list[int]:
        while len(self.tokens) < count:
            self._digest.update(self.tokens[-1].to_bytes(4, "little"))
            number = int.from_bytes(self._digest.digest(), "little")
            self.tokens.append(number % LLAMA["vocab_size"])
        return self.tokens[:count]

    def sample(self, computed: int) -> list[int]:
        """The next token, if `computed` tokens are all that there are so far."""
        if computed < self.prompt_tokens + self.sampled:
            return []
        self.sampled += 1
        return [self.upto(computed + 1)[-1]]
