# SPDX-License-Identifier: Apache-2.0
"""Hints about a request in the forms of other systems: their names, and FlexKV's names for them.

Routers, agents and gateways have names of their own for a conversation, for how long its blocks are
wanted, and for how much to load. Engines pass these on in several fields of a request. Hints are
advice: a value that FlexKV does not follow is counted and not logged.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flexkv.client import MOST_PRIORITY

NAME_CHARACTERS = 64
"""The longest name of pins or of a conversation that is kept as it is; a UUID has 36 characters."""

MOST_RETAIN_SECONDS = 3600
"""The longest time that a request may ask to retain its blocks: the longest of the public forms."""

_MOST_ACTIONS = 16
"""Actions of one envelope that are read."""

_SESSION_KEYS = ("session_id", "x-session-id", "prompt_cache_key")
_TTL_KEYS = ("ttl", "ttl_seconds", "retention_ttl_seconds", "kv_retention_ttl_seconds", "seconds")
_ACTIONS = {
    "kv.retain": "retain",
    "kv.pin": "retain",
    "kv.release": "release",
    "kv.evict": "release",
    "kv.fetch": "fetch",
    "kv.prefetch": "prefetch",
    "kv.demote": "demote",
    "kv.offload": "demote",
}
"""Types of actions in vLLM's `kv_hints`, and the labels of the metric."""
_ALWAYS = ("fetch", "prefetch")
"""Actions that ask for what is done for every queued request."""
_UNITS = {"s": 1, "m": 60, "h": 3600}


class HintResult(enum.Enum):
    """What became of a hint. The values are labels of the metric."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    """It asks for more than requests may get."""
    EXPIRED = "expired"
    """Its time is not above 0."""
    UNSUPPORTED = "unsupported"
    """FlexKV does not follow it here, or cannot read its value."""


class Hint(NamedTuple):
    """One hint. It stands for an `option` of a request; empty if it has no effect."""

    action: str
    result: HintResult
    option: str = ""
    value: Any = None


class EngineHints(NamedTuple):
    """Fields of an engine's request that have hints, each as the engine has it.

    Attributes:
        session_id: the name of the conversation, which engines take from the request's body, or
            from a header.
        extra: further parameters of the request (vLLM's `vllm_xargs`).
        priority: the priority of the request in the engine's queue; None for the usual one. The
            lowest is served first.
    """

    session_id: object = None
    extra: object = None
    envelope: object = None
    priority: object = None


NO_HINTS = EngineHints()


def name_of(text: str) -> str:
    """`text` as the name of a conversation: its hash if it is long."""
    if len(text) <= NAME_CHARACTERS:
        return text
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def read_hints(
    params: Mapping[Any, Any], engine: EngineHints, own_tokens: bool = True
) -> Iterator[Hint]:
    """The hints of a request; if several are about the same option, the first counts. FlexKV
    follows limits of tokens if `own_tokens` says so; if not, the engine does."""
    fields = [each for each in (params, engine.extra) if isinstance(each, Mapping)]
    asked: list[Any] = [each.get("agentic_context") for each in fields]
    contexts: list[Mapping[Any, Any]] = [each for each in asked if isinstance(each, Mapping)]
    names = [engine.session_id]
    names += [each.get(key) for each in fields for key in _SESSION_KEYS]
    names += [each.get("program_id") for each in contexts]
    for name in names:
        if isinstance(name, str) and name:
            yield Hint("session", HintResult.ACCEPTED, "session", name_of(name))
    if own_tokens:
        yield from _limits(params)
    for context in contexts:
        yield from _retentions(context)
        if isinstance(resumes := context.get("expected_resume"), bool):
            yield Hint("returns", HintResult.ACCEPTED, "returns", resumes)
    if isinstance(engine.priority, int) and engine.priority:
        yield importance(-engine.priority)
    yield from _actions(engine.envelope)


def importance(value: object) -> Hint:
    """The hint that a request has a priority, of which the highest goes first."""
    if not isinstance(value, int) or isinstance(value, bool):
        return Hint("priority", HintResult.UNSUPPORTED)
    kept = max(-MOST_PRIORITY, min(value, MOST_PRIORITY))
    result = HintResult.ACCEPTED if kept == value else HintResult.CLIPPED
    return Hint("priority", result, "priority", kept)


def retention(value: object) -> Hint:
    """The hint to retain blocks for a time: a number of seconds, or a text such as `5m`."""
    seconds = _seconds(value)
    if seconds is None:
        return Hint("retain", HintResult.UNSUPPORTED)
    if seconds <= 0:
        return Hint("retain", HintResult.EXPIRED)
    result = HintResult.CLIPPED if seconds > MOST_RETAIN_SECONDS else HintResult.ACCEPTED
    return Hint("retain", result, "retain_seconds", min(seconds, float(MOST_RETAIN_SECONDS)))


def _limits(params: Mapping[Any, Any]) -> Iterator[Hint]:
    """vLLM's limits, which llm-d sends too."""
    for key, option in (
        ("max_load_tokens", "max_load_tokens"),
        ("max_offload_tokens", "max_store_tokens"),
    ):
        value = params.get(key)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            yield Hint(option, HintResult.ACCEPTED, option, value)
        else:
            yield Hint(option, HintResult.UNSUPPORTED)


def _retentions(fields: Mapping[Any, Any]) -> Iterator[Hint]:
    for key in _TTL_KEYS:
        if fields.get(key) is not None:
            yield retention(fields[key])
            return


def _actions(envelope: object) -> Iterator[Hint]:
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, list):
        return
    for number, each in enumerate(actions):
        kind = getattr(each, "action_type", None)
        kind = kind.partition("@")[0] if isinstance(kind, str) else ""
        action = _ACTIONS.get(kind, "other")
        payload = getattr(each, "payload", None)
        if number >= _MOST_ACTIONS or not isinstance(payload, Mapping):
            yield Hint(action, HintResult.UNSUPPORTED)
        elif action == "release":
            yield Hint(action, HintResult.ACCEPTED, "release", True)
        elif action == "demote":
            yield Hint(action, HintResult.ACCEPTED, "demote", True)
        elif action in _ALWAYS:
            yield Hint(action, HintResult.ACCEPTED)
        elif action == "retain" and (found := list(_retentions(payload))):
            yield from found
        else:
            yield Hint(action, HintResult.UNSUPPORTED)


def _seconds(value: object) -> float | None:
    if isinstance(value, str) and len(value) <= NAME_CHARACTERS:
        unit = _UNITS.get(value[-1:], 0)
        number = value[:-1] if unit else value
        return int(number) * float(unit or 1) if number.isdecimal() else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
