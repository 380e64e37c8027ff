# SPDX-License-Identifier: Apache-2.0
"""Questions and answers about a prompt, a conversation or a whole cache, as JSON."""

from __future__ import annotations

import os
import re
from typing import Literal, TypeAlias, TypeVar

import msgspec

from flexkv.control.http_door import RefusedError
from flexkv.system.processes import pid_namespace, process_text
from flexkv.types.texts import exact

MOST_TOKENS = 1 << 20
"""The most tokens, and the most hashes, of a question. Not tuned."""
MOST_PIN_SECONDS = 30 * 24 * 3600
"""The longest pin: a month, as in requests."""
_MOST_NAME = 64
_MOST_SESSION = 4096
_MOST_ID = (1 << 32) - 1
_HASH = re.compile("(?:[0-9a-f]{2}){4,64}")


_Question = TypeVar("_Question", bound=msgspec.Struct)


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


class PinQuestion(PromptQuestion, frozen=True, forbid_unknown_fields=True):
    """A prompt whose blocks are pinned.

    Attributes:
        name: name of the pin.
        seconds: seconds until the pin ends; None for the setting `pin_seconds`.
    """

    name: str = "default"
    seconds: float | None = None


class UnpinQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a pin that ends."""

    name: str = "default"


class SessionQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation.

    Attributes:
        session: its name, as clients give it.
        cache_salt: salt of its requests; empty for none.
    """

    session: str
    cache_salt: str = ""


class OfProcess(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of one process.

    Attributes:
        pid: its id as it knows itself.
        pid_namespace: where it has this id; see `pid_namespace`.
    """

    pid: int = msgspec.field(default_factory=os.getpid)
    pid_namespace: int = msgspec.field(default_factory=pid_namespace)

    @property
    def process(self) -> str:
        """The id for people."""
        return process_text(self.pid, self.pid_namespace)


class SessionEffect(OfProcess, frozen=True):
    """What was done about a conversation.

    Attributes:
        session: its name.
        blocks: how many of its blocks it was done to; 0 if the engine knows none.
        reason: why not to all, for people; empty if there is no reason.
    """

    session: str
    blocks: int
    reason: str = ""


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


class PromptPlaces(OfProcess, frozen=True):
    """Where one cache has the blocks of a prompt.

    Attributes:
        engine: name of the engine; empty for a service.
        fingerprint: of the blocks.
        blocks: whole blocks of the prompt.
        found: how many of them, from the first on without a gap, some tier has.
        block_tokens: tokens of a block; None if the cache does not know.
        tiers: the tiers, the fastest first.
    """

    engine: str
    fingerprint: str
    blocks: int
    found: int
    block_tokens: int | None
    tiers: tuple[TierPlaces, ...]


class PromptEffect(msgspec.Struct, frozen=True):
    """What was done about a prompt.

    Attributes:
        places: where its blocks are afterwards.
        done: how many of its blocks it was done to.
        reason: why not to all, for people; empty if there is no reason.
    """

    places: PromptPlaces
    done: int
    reason: str


class Unpinned(OfProcess, frozen=True):
    """No pin has this name any more.

    Attributes:
        name: the name.
        was_pinned: whether there were such pins.
    """

    name: str
    was_pinned: bool


class ClearQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All blocks of an engine, said by a word: an empty question may have lost its content."""

    blocks: Literal["all"]


class ClearEffect(OfProcess, frozen=True):
    """An engine has dropped all its blocks.

    Attributes:
        engine: name of the engine.
        fingerprint: of the blocks.
        blocks: how many of them host memory had.
        reason: why some may stay, for people; empty if there is no reason.
    """

    engine: str
    fingerprint: str
    blocks: int
    reason: str = ""


AllPlaces: TypeAlias = tuple[PromptPlaces, ...]
"""The answer of one process, which may have several caches."""


def read_question(body: bytes) -> PromptQuestion:
    """Read a question about a prompt.

    Raises:
        RefusedError: it is none.
    """
    question = _decoded(body, PromptQuestion)
    check_question(question)
    return question


def read_pin(body: bytes) -> PinQuestion:
    """Read what is to be pinned.

    Raises:
        RefusedError: it is nothing that can be.
    """
    question = _decoded(body, PinQuestion)
    check_question(question)
    check_pin(question)
    return question


def read_unpin(body: bytes) -> UnpinQuestion:
    """Read what pin is to end.

    Raises:
        RefusedError: it is none.
    """
    question = _decoded(body, UnpinQuestion)
    check_name(question.name)
    return question


def read_session(body: bytes) -> SessionQuestion:
    """Read what conversation is meant.

    Raises:
        RefusedError: it is none.
    """
    question = _decoded(body, SessionQuestion)
    check_session(question)
    return question


def read_clear(body: bytes) -> ClearQuestion:
    """Read that all blocks are meant.

    Raises:
        RefusedError: it says nothing, or something else, such as a prompt whose blocks alone were
            meant.
    """
    try:
        return msgspec.json.decode(body, type=ClearQuestion)
    except msgspec.DecodeError as error:
        raise RefusedError(
            f"the question is not about all blocks ({error}); allowed: "
            '{"blocks": "all"}, or to /remove the blocks of a prompt'
        ) from None


def check_session(question: SessionQuestion) -> None:
    """Check the name of a conversation.

    Raises:
        RefusedError: it is too long, or missing.
    """
    length = len(question.session)
    if not 1 <= length <= _MOST_SESSION:
        raise RefusedError(
            f"the name of the conversation has {length} characters; allowed: 1 to {_MOST_SESSION}"
        )


def check_pin(question: PinQuestion) -> None:
    """Check name and time of a pin.

    Raises:
        RefusedError: they are not allowed.
    """
    check_name(question.name)
    seconds = question.seconds
    if seconds is not None and not 0 < seconds <= MOST_PIN_SECONDS:
        raise RefusedError(
            f"seconds is {exact(seconds)}; allowed: above 0, up to {MOST_PIN_SECONDS}"
        )


def check_name(name: str) -> None:
    """Check the name of a pin.

    Raises:
        RefusedError: it has another length.
    """
    if not 1 <= len(name) <= _MOST_NAME:
        raise RefusedError(
            f"the name of a pin is {name[: 2 * _MOST_NAME]!r}; allowed: 1 to {_MOST_NAME} "
            "characters"
        )


def _decoded(body: bytes, kind: type[_Question]) -> _Question:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise RefusedError(
            f"the question is no JSON of a prompt ({error}); allowed: "
            '{"tokens": [1, 2], "cache_salt": ""} or {"hashes": ["00ff..."]}'
        ) from None


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
