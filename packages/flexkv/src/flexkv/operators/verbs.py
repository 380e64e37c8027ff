# SPDX-License-Identifier: Apache-2.0
"""The table of calls: questions and answers about a prompt, a conversation or a whole cache, as
JSON, and their OpenAPI description."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec

from flexkv.system.processes import pid_namespace, process_text
from flexkv.types.texts import exact
from flexkv.version import __version__

MOST_TOKENS = 1 << 20
"""The most tokens, and the most hashes, of a question."""
MOST_PIN_SECONDS = 30 * 24 * 3600
"""The longest pin: a month, as in requests."""
_MOST_NAME = 64
_MOST_SESSION = 4096
_MOST_ID = (1 << 32) - 1
_HASH = re.compile("(?:[0-9a-f]{2}){4,64}")


class SilentError(Exception):
    """Whoever knows the answer has not come to the question in time. The message says so."""


class RefusedError(Exception):
    """The question cannot be answered. The message names the value, and what is allowed."""


class OperatorQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a call."""

    problem: ClassVar[str]
    """What is said of a body that is no such question."""
    allowed: ClassVar[str]
    """What is said to be allowed then."""

    def check(self) -> None:
        """Check the values. Raises RefusedError if the question cannot be answered."""


class PromptQuestion(OperatorQuestion, frozen=True, forbid_unknown_fields=True):
    """A prompt, by the ids of its tokens, or by the engine's hashes in hex, one for each of its
    blocks, first block first. `cache_salt` is that of its requests; it is for tokens only, because
    a hash covers it."""

    problem = "is no JSON of a prompt"
    allowed = '{"tokens": [1, 2], "cache_salt": ""} or {"hashes": ["00ff..."]}'

    tokens: tuple[int, ...] = ()
    hashes: tuple[str, ...] = ()
    cache_salt: str = ""

    def check(self) -> None:
        tokens, hashes = self.tokens, self.hashes
        if bool(tokens) == bool(hashes):
            raise RefusedError(
                f"the prompt has {len(tokens)} tokens and {len(hashes)} hashes; allowed: at least "
                "one token, or at least one hash, and not both"
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
        if hashes and self.cache_salt:
            raise RefusedError(
                "the prompt has hashes and a cache_salt; allowed: a salt with tokens only, because "
                "a hash covers it"
            )


class UnpinQuestion(OperatorQuestion, frozen=True, forbid_unknown_fields=True):
    """The name of a pin that ends."""

    problem = "is no JSON of a pin"
    allowed = '{"name": "default"}'

    name: str = "default"

    def check(self) -> None:
        _check_name(self.name)


class PinQuestion(PromptQuestion, frozen=True, forbid_unknown_fields=True):
    """A prompt whose blocks are pinned by a name, for so many seconds; None for the setting
    `pin_seconds`."""

    name: str = "default"
    seconds: float | None = None

    def check(self) -> None:
        PromptQuestion.check(self)
        _check_name(self.name)
        if self.seconds is not None and not 0 < self.seconds <= MOST_PIN_SECONDS:
            raise RefusedError(
                f"seconds is {exact(self.seconds)}; allowed: above 0, up to {MOST_PIN_SECONDS}"
            )


class SessionQuestion(OperatorQuestion, frozen=True, forbid_unknown_fields=True):
    """A conversation, by its name as clients give it, and the salt of its requests."""

    problem = "is no JSON of a conversation"
    allowed = '{"session": "NAME", "cache_salt": ""}'

    session: str
    cache_salt: str = ""

    def check(self) -> None:
        length = len(self.session)
        if not 1 <= length <= _MOST_SESSION:
            raise RefusedError(
                f"the name of the conversation has {length} characters; allowed: 1 to "
                f"{_MOST_SESSION}"
            )


class ClearQuestion(OperatorQuestion, frozen=True, forbid_unknown_fields=True):
    """All blocks of an engine, said by a word: an empty question may have lost its content."""

    problem = "is not about all blocks"
    allowed = '{"blocks": "all"}, or to /remove the blocks of a prompt'

    blocks: Literal["all"]


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= _MOST_NAME:
        raise RefusedError(
            f"the name of a pin is {name[: 2 * _MOST_NAME]!r}; allowed: 1 to {_MOST_NAME} "
            "characters"
        )


class OfProcess(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of one process: its id as it knows itself, and where it has this id."""

    pid: int = msgspec.field(default_factory=os.getpid)
    pid_namespace: int = msgspec.field(default_factory=pid_namespace)

    @property
    def process(self) -> str:
        """The id for people."""
        return process_text(self.pid, self.pid_namespace)


class SessionEffect(OfProcess, frozen=True):
    """How many blocks of a conversation something was done to, 0 if the engine knows none; and why
    not to all, for people."""

    session: str
    blocks: int
    reason: str = ""


class TierPlaces(msgspec.Struct, frozen=True):
    """How many of the blocks that were found a tier has, which is named as in metrics. `is_sure`
    says whether it knows that it lacks the first block that was not found: a shared store does not
    know which blocks it has."""

    tier: str
    blocks: int
    is_sure: bool


class PromptPlaces(OfProcess, frozen=True):
    """Where one cache has the blocks of a prompt."""

    engine: str
    """Empty for a service."""
    fingerprint: str
    blocks: int
    """Whole blocks of the prompt."""
    found: int
    """How many of them, from the first on without a gap, some tier has."""
    block_tokens: int | None
    """None if the cache does not know."""
    tiers: tuple[TierPlaces, ...]
    """The fastest first."""

    @property
    def in_host(self) -> int:
        """How many of the found blocks host memory has; a prompt without a whole block has none."""
        return self.tiers[0].blocks if self.tiers else 0


AllPlaces: TypeAlias = tuple[PromptPlaces, ...]
"""The answer of one process, which may have several caches."""


class PromptEffect(msgspec.Struct, frozen=True):
    """How many blocks of a prompt something was done to, where its blocks are afterwards, and why
    it was not done to all, for people."""

    places: PromptPlaces
    done: int
    reason: str


class Unpinned(OfProcess, frozen=True):
    """No pin has this name any more; `was_pinned` says whether there were such pins."""

    name: str
    was_pinned: bool


class ClearEffect(OfProcess, frozen=True):
    """An engine has dropped all its blocks: how many host memory had, and why some may stay, for
    people."""

    engine: str
    fingerprint: str
    blocks: int
    reason: str = ""


_Asked = TypeVar("_Asked", bound=OperatorQuestion)
_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True)
class Verb(Generic[_Asked, _Said]):
    """A call, by POST. `text` says what it does; `question` and `answer` are their types."""

    path: str
    text: str
    question: type[_Asked]
    answer: type[_Said]

    def read(self, body: bytes) -> _Asked:
        """Read a question. Raises RefusedError if it is none, or cannot be answered."""
        try:
            question = msgspec.json.decode(body, type=self.question)
        except msgspec.DecodeError as error:
            kind = self.question
            raise RefusedError(
                f"the question {kind.problem} ({error}); allowed: {kind.allowed}"
            ) from None
        question.check()
        return question


LOOKUP = Verb("/lookup", "Which tiers have the blocks of a prompt", PromptQuestion, AllPlaces)
WARM = Verb(
    "/warm", "Bring a prompt from lower tiers into host memory", PromptQuestion, PromptEffect
)
DEMOTE = Verb(
    "/demote", "Move a prompt from host memory to lower tiers", PromptQuestion, PromptEffect
)
PIN = Verb("/pin", "Keep a prompt in host memory", PinQuestion, PromptEffect)
UNPIN = Verb("/unpin", "End the pins of a name", UnpinQuestion, Unpinned)
REMOVE = Verb("/remove", "Remove a prompt from host memory and disk", PromptQuestion, PromptEffect)
RELEASE = Verb(
    "/release", "Evict the blocks of a conversation first", SessionQuestion, SessionEffect
)
REMOVE_SESSION = Verb(
    "/remove_session",
    "Remove the blocks that only one conversation has from host memory and disk",
    SessionQuestion,
    SessionEffect,
)
CLEAR = Verb(
    "/clear",
    "Remove all blocks of the engine from host memory and disk",
    ClearQuestion,
    ClearEffect,
)

Answers: TypeAlias = Mapping[Verb[Any, Any], Callable[[Any], object]]
"""By verb what answers its questions. Raises SilentError, RefusedError."""


def describe(verbs: Iterable[Verb[Any, Any]]) -> dict[str, Any]:
    """The OpenAPI description of calls."""
    listed = list(verbs)
    schemas, parts = msgspec.json.schema_components(
        [kind for verb in listed for kind in (verb.question, verb.answer)],
        ref_template="#/components/schemas/{name}",
    )
    errors = {
        "400": "the question is refused",
        "401": "the token is missing or wrong",
        "503": "the engine has not let the call in",
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "FlexKV: the cache of one engine", "version": __version__},
        "security": [{"token": []}],
        "paths": {
            verb.path: {
                "post": {
                    "summary": verb.text,
                    "requestBody": {"required": True, "content": _json(question)},
                    "responses": {"200": {"description": "the answer", "content": _json(answer)}}
                    | {code: {"description": text} for code, text in errors.items()},
                }
            }
            for verb, question, answer in zip(listed, schemas[::2], schemas[1::2], strict=True)
        },
        "components": {
            "schemas": parts,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
