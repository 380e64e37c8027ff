# SPDX-License-Identifier: Apache-2.0
"""All prompts of the equality tests, so that one engine without a connector answers them once.

``PREFIX`` is what the tests store first; the prompts of ``PARTIAL`` share a given number of its
tokens. Sizes are in tokens. ``ENGINE_BLOCK`` and ``FLEXKV_BLOCK`` are those of the engine that
most tests share.
"""

from __future__ import annotations

from dataclasses import dataclass

from integration.harness.checkpoint import TINY
from integration.harness.prompts import random_tokens

Tokens = tuple[int, ...]

ENGINE_BLOCK = 32
FLEXKV_BLOCK = 64
# What one step of the shared engine computes at most: LONG prompts take several steps.
BATCHED_TOKENS = 512
NEW_TOKENS = 24


def tokens(seed: str, length: int) -> Tokens:
    """Random tokens of the tests' model."""
    return tuple(random_tokens(seed, length, TINY.vocab))


@dataclass(frozen=True, slots=True)
class Partial:
    """A prompt that shares its first ``shared`` tokens with ``PREFIX`` and no more."""

    name: str
    shared: int
    prompt: Tokens

    @property
    def expected_hit(self) -> int:
        """Tokens of the whole FlexKV blocks that it shares; a full hit leaves none to compute,
        and vLLM then computes the last token again."""
        return self.shared // FLEXKV_BLOCK * FLEXKV_BLOCK


PREFIX = tokens("prefix", 10 * FLEXKV_BLOCK)


def _sharing(name: str, shared: int, length: int) -> Partial:
    return Partial(name, shared, PREFIX[:shared] + tokens(name, length - shared))


PARTIAL = (
    _sharing("nothing", 0, 300),
    _sharing("one block less one token", FLEXKV_BLOCK - 1, 300),
    _sharing("all of it", len(PREFIX), len(PREFIX)),
    _sharing("a prompt of one block and one token", FLEXKV_BLOCK + 1, FLEXKV_BLOCK + 1),
    _sharing("five blocks and 17 tokens", 5 * FLEXKV_BLOCK + 17, 5 * FLEXKV_BLOCK + 17 + 900),
)
"""One of each class: nothing, less than a block, a hit that leaves no token, a hit that leaves one,
and a hit whose rest takes several steps. `test_world` of the adapter has further lengths."""

WARM = tuple(tokens(f"warm {n}", n) for n in (65, 200, 449, 512))
LONG = tuple(tokens(f"long {n}", n) for n in (BATCHED_TOKENS + 1, 1500, 4000))


def _concurrent() -> tuple[Tokens, ...]:
    """16 prompts: of four texts, each cut to four lengths, so that they share prefixes."""
    texts = [tokens(f"text {i}", 1400) for i in range(4)]
    return tuple(text[:length] for text in texts for length in (150, 420, 900, 1400))


CONCURRENT = _concurrent()

# 16 prompts of just under three engine blocks, to generate past several block ends: the running
# requests together outgrow a small KV cache again and again.
PREEMPTED = tuple(tokens(f"preempted {i}", 3 * ENGINE_BLOCK - 1 - i % 3) for i in range(16))
PREEMPTED_NEW_TOKENS = 150

# Together three times what the tiny arena of its test holds.
EVICTED = tuple(tokens(f"evicted {i}", 8 * FLEXKV_BLOCK + 5) for i in range(12))

ABORTED = tuple(tokens(f"aborted {i}", 3000 + 100 * i) for i in range(4))
SALTED = tokens("salted", 400)

# Blocks of this one are damaged: 15 whole engine blocks, 7 FlexKV blocks and a rest.
DAMAGED = tokens("damaged", 500)

SHORT = tokens("short", ENGINE_BLOCK // 2)
"""Fills no block: with it an idle engine makes some steps, and tells what happened since the
last."""

# A conversation grows by the answer and by what the user says next.
TURNS = (tokens("turn 1", 300), tokens("turn 2", 111), tokens("turn 3", 75))

SINGLE = (
    PREFIX,
    *(case.prompt for case in PARTIAL),
    *WARM,
    *LONG,
    *CONCURRENT,
    *EVICTED,
    *ABORTED,
    SALTED,
    DAMAGED,
)
"""Everything that is asked for with NEW_TOKENS."""
