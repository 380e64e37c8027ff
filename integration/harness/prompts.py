# SPDX-License-Identifier: Apache-2.0
"""Random prompts as token ids, the same for the same seed."""

from __future__ import annotations

import random

# Ids below are special tokens of Llama's vocabulary.
_FIRST_TOKEN = 3


def random_tokens(seed: int | str, length: int, vocab: int) -> list[int]:
    """``length`` token ids below ``vocab``; different seeds share no prefix worth a block."""
    rng = random.Random(f"{seed}/{vocab}")
    return [rng.randrange(_FIRST_TOKEN, vocab) for _ in range(length)]
