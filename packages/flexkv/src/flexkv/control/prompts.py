# SPDX-License-Identifier: Apache-2.0
"""Questions and answers about a prompt, as JSON."""

from __future__ import annotations

import re
from typing import TypeAlias

import msgspec

from flexkv.control.http_door import RefusedError

MOST_TOKENS = 1 << 20
"""The most tokens, and the most hashes, of a question. Not tuned."""
_MOST_ID = (1 << 32) - 1
_HASH = re.compile("(?:[0-9a-f]{2}){4,64}")


class PromptQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, by its tokens or by the engine's hashes of its blocks.

    Attributes:
        tokens: ids of its tokens.
        hashes: the engine's hashes in hex, one for each of its blocks, first block first.
        cache_salt: salt of the requests that have the prompt; empty for none. For tokens only: a
            hash covers it.
    """

    tokens: tuple[int, ...] = ()
    hashes: tuple[str, ...] = ()
    cache_salt: str = ""


class TierPlaces(msgspec.Struct, frozen=True):
    """What a tier has of the blocks that were found.

    Attributes:
        tier: name of the tier, as in metrics.
        blocks: how many of them it has.
        is_sure: whether it knows that it lacks the first block that was not found. A shared store
            does not know which blocks it has.
    """

    tier: str
    blocks: int
    is_sure: bool


class PromptPlaces(msgspec.Struct, frozen=True):
    """Where one cache has the blocks of a prompt.

    Attributes:
        engine: name of the engine; empty for a service.
        pid: process of the cache, in its own PID namespace.
        fingerprint: of the blocks.
        blocks: whole blocks of the prompt.
        found: how many of them, from the first on without a gap, some tier has.
        block_tokens: tokens of a block; None if the cache does not know.
        tiers: the tiers, the fastest first.
    """

    engine: str
    pid: int
    fingerprint: str
    blocks: int
    found: int
    block_tokens: int | None
    tiers: tuple[TierPlaces, ...]


AllPlaces: TypeAlias = tuple[PromptPlaces, ...]
"""The answer of one process, which may have several caches."""


def read_question(body: bytes) -> PromptQuestion:
    """Read a question.

    Raises:
        RefusedError: it is none.
    """
    try:
        question = msgspec.json.decode(body, type=PromptQuestion)
    except msgspec.DecodeError as error:
        raise RefusedError(
            f"the question is no JSON of a prompt ({error}); allowed: "
            '{"tokens": [1, 2], "cache_salt": ""} or {"hashes": ["00ff..."]}'
        ) from None
    check_question(question)
    return question


def check_question(question: PromptQuestion) -> None:
    """Check a question.

    Raises:
        RefusedError: it cannot be answered.
    """
    tokens, hashes = question.tokens, question.hashes
    if bool(tokens) == bool(hashes):
        raise RefusedError(
            f"the prompt has {len(tokens)} tokens and {len(hashes)} hashes; allowed: at least one "
            "token, or at least one hash, and not both"
        )
    if len(tokens) + len(hashes) > MOST_TOKENS:
        raise RefusedError(
            f"the prompt has {len(tokens) + len(hashes)} tokens or hashes; allowed: at most "
            f"{MOST_TOKENS}"
        )
    wrong = next((each for each in tokens if not 0 <= each <= _MOST_ID), None)
    if wrong is not None:
        raise RefusedError(f"the prompt has the token {wrong}; allowed: 0 to {_MOST_ID}")
    text = next((each for each in hashes if not _HASH.fullmatch(each)), None)
    if text is not None:
        raise RefusedError(
            f"the prompt has the hash {text[:140]!r}; allowed: 4 to 64 bytes in lower-case hex"
        )
    if hashes and question.cache_salt:
        raise RefusedError(
            "the prompt has hashes and a cache_salt; allowed: a salt with tokens only, because a "
            "hash covers it"
        )
