# SPDX-License-Identifier: Apache-2.0
"""A user's options for one request, from a dictionary of the request.

Wrong parameters are logged in one line and ignored: the request is served either way. FlexKV
ignores the keys of other connectors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flexkv.client import MOST_PRIORITY
from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.hints import (
    MOST_RETAIN_SECONDS,
    NAME_CHARACTERS,
    NO_HINTS,
    EngineHints,
    Hint,
    HintResult,
    importance,
    name_of,
    read_hints,
    retention,
)
from flexkv.eviction import RequestContext
from flexkv.figures.definitions import HINTS, IGNORED_PARAMETERS
from flexkv.figures.meter import Meter
from flexkv.settings import MOST_PIN_SECONDS
from flexkv.types.changes import Medium
from flexkv.types.tenants import tenant_number

logger = logging.getLogger(__name__)

PREFIX = "flexkv."
ANNOUNCED = "announced_tokens"
"""The parameter that the answer of an engine to a prefill request has for the engine that decodes
it."""

_SHOWN_CHARACTERS = 80
"""The most characters of a key or value in the log, since any client may send them."""
_WARNINGS = 100
"""Requests that the log names, one line each, for the same reason; later ones are only counted."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request.

    Attributes:
        max_load_tokens: the most tokens to load; None for no limit.
        pin_seconds: time until the pin ends; None for the setting's.
        pin_name: name of the pin, within the same cache salt.
        load_mode: overrides the setting, unless that is `async`; None for the setting's.
        session: name of the conversation, within the same cache salt; empty if not named.
        returns: whether a prompt that begins with this one is expected soon; None if not said.
        max_store_tokens: the first tokens whose blocks are cached; None for all.
        retain_seconds: seconds for which its blocks stay in host memory; see `Hold.RETAIN`.
            None if not said.
        release: whether its conversation ends with it: its blocks need not be retained, and no
            prompt that begins with this one is expected.
        priority: from -`MOST_PRIORITY` to `MOST_PRIORITY`; tiers read for the highest first, and of
            blocks that the eviction policy values alike, those of the lowest go first. None if not
            said, which is 0.
        demote: whether its blocks go to lower tiers, and leave host memory, when it ends.
        announced_tokens: the first tokens of its prompt whose blocks another engine writes to a
            shared store.
    """

    load: bool = True
    store: bool = True
    max_load_tokens: int | None = None
    pin: bool = False
    pin_seconds: float | None = None
    pin_name: str = ""
    unpin: bool = False
    load_mode: LoadMode | None = None
    session: str = ""
    returns: bool | None = None
    max_store_tokens: int | None = None
    retain_seconds: float | None = None
    release: bool = False
    priority: int | None = None
    demote: bool = False
    announced_tokens: int = 0

    def limit_stored(self, tokens: int) -> int:
        """How many of the first `tokens` tokens may be cached."""
        most = self.max_store_tokens
        return tokens if most is None else min(tokens, most)


NONE = RequestOptions()


class Role(NamedTuple):
    """What the engine may do with blocks; options of requests only restrict it further."""

    loads: bool = True
    stores: bool = True

    def limit(self, options: RequestOptions) -> RequestOptions:
        """The options of a request in an engine of this role."""
        if all(self):
            return options
        load, store = options.load and self.loads, options.store and self.stores
        return replace(options, load=load, store=store)


BOTH = Role()


def _read_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError


def _read_count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError


def _read_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    if 0 < value <= MOST_PIN_SECONDS:
        return float(value)
    raise ValueError


def _read_name(value: object) -> str:
    if isinstance(value, str) and 0 < len(value) <= NAME_CHARACTERS:
        return value
    raise ValueError


def _read_session(value: object) -> str:
    if isinstance(value, str) and value:
        return name_of(value)
    raise ValueError


_FLAG = "true or false"
_COUNT = "a whole number from 0 on"
_PARAMETERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "load": (_read_flag, _FLAG),
    "store": (_read_flag, _FLAG),
    "max_load_tokens": (_read_count, _COUNT),
    "pin": (_read_flag, _FLAG),
    "pin_seconds": (_read_seconds, f"a number above 0, up to {MOST_PIN_SECONDS}"),
    "pin_name": (_read_name, f"a text of 1 to {NAME_CHARACTERS} characters"),
    "unpin": (_read_flag, _FLAG),
    "load_mode": (LoadMode, ", ".join(mode.value for mode in LoadMode)),
    "session": (_read_session, "a text that is not empty"),
    "returns": (_read_flag, _FLAG),
    "max_store_tokens": (_read_count, _COUNT),
    "retain_seconds": (retention, f"a number above 0; at most {MOST_RETAIN_SECONDS} count"),
    "release": (_read_flag, _FLAG),
    "priority": (importance, f"a whole number; -{MOST_PRIORITY} to {MOST_PRIORITY} count"),
    "demote": (_read_flag, _FLAG),
    ANNOUNCED: (_read_count, _COUNT),
}
"""For each parameter the function that reads its value or raises ValueError, and the allowed
values, for errors. Values that are clipped to a bound are read as hints."""


_HINTS = {
    "session": "session",
    "returns": "returns",
    "max_load_tokens": "max_load_tokens",
    "max_store_tokens": "max_store_tokens",
    "release": "release",
    "demote": "demote",
}
"""Of each other parameter that has further forms, the action in the metric of hints."""


def pin_owner(request: EngineRequest, options: RequestOptions) -> tuple[str, str]:
    """The owner of a request's pins: each cache salt has names of its own."""
    return _salt_of(request), options.pin_name


def tenant_of(request: EngineRequest) -> tuple[str, str]:
    """The owner of the blocks that a request retains."""
    return retaining(_salt_of(request))


def retaining(cache_salt: str) -> tuple[str, str]:
    """The owner of the blocks that requests of a cache salt retain."""
    return "retained", cache_salt


def tenant_number_of(request: EngineRequest) -> int:
    """The number of the tenant that a request's cache salt names."""
    return tenant_number(_salt_of(request))


def session_of(request: EngineRequest, options: RequestOptions) -> str:
    """The name of a request's conversation among those of all tenants; empty if it has none."""
    return tenant_session(_salt_of(request), options.session)


def context_of(request: EngineRequest, options: RequestOptions, hit_tokens: int) -> RequestContext:
    """Make the context of a request for an eviction policy."""
    return RequestContext(
        request.num_prompt_tokens,
        hit_tokens,
        request.request_id,
        session_of(request, options),
        options.returns,
        tenant_number_of(request),
        options.store and options.max_store_tokens is None,
        options.priority or 0,
    )


def tenant_session(tenant: str, session: str) -> str:
    """The name of a conversation among those of all tenants; empty if it has none."""
    return f"{tenant}\0{session}" if session else ""


def _salt_of(request: EngineRequest) -> str:
    return getattr(request, "cache_salt", None) or ""


class OptionsReader:
    """Reads the options of requests.

    Args:
        allowed: the parameters that requests may set (setting `request_options`); None for all.
        names: the parameters that the engine's adapter follows; None for all.
        field: the engine's name of the dictionary that has them, for errors.
        own_tokens: see `read_hints`, whose results are counted in `hints`.
    """

    def __init__(
        self,
        allowed: Collection[str] | None = None,
        names: Collection[str] | None = None,
        field: str = "kv_transfer_params",
        role: Role = BOTH,
        own_tokens: bool = True,
    ) -> None:
        self.ignored = 0
        self.hints: Counter[tuple[str, HintResult]] = Counter()
        self._followed = _PARAMETERS if names is None else names
        self._names = [name for name in self._followed if allowed is None or name in allowed]
        self._field = field
        self._role = role
        self._own_tokens = own_tokens
        self._unsupported: set[str] = set()
        self._warnings = 0

    def set_media(self, media: Collection[Medium]) -> None:
        """The engine's cache has these lower tiers. Without one, requests demote nothing."""
        if not media:
            self._unsupported.add("demote")

    def of(self, request: EngineRequest) -> RequestOptions:
        """The options of `request`."""
        hints = EngineHints(
            getattr(request, "session_id", None),
            getattr(getattr(request, "sampling_params", None), "extra_args", None),
            getattr(request, "kv_hints", None),
            getattr(request, "priority", None) or None,
        )
        return self.read(request.request_id, getattr(request, "kv_transfer_params", None), hints)

    def read(
        self, request_id: str, params: object, hints: EngineHints = NO_HINTS
    ) -> RequestOptions:
        """The options of the request of that id, from its dictionary of parameters and from hints
        in other forms. The parameters with FlexKV's own names win."""
        if not params and hints == NO_HINTS:
            return self._role.limit(NONE)
        if params is not None and not isinstance(params, Mapping):
            self._ignore(request_id, 1, f"is {_shown(params)}", "a dictionary")
        fields: Mapping[Any, Any] = params if isinstance(params, Mapping) else {}
        options = self._read_own(request_id, fields) if fields else {}
        for hint in read_hints(fields, hints, self._own_tokens):
            self._follow(hint, options)
        if options.get("release"):
            options["returns"] = False
        return self._role.limit(RequestOptions(**options) if options else NONE)

    def put_counts(self, meter: Meter) -> None:
        """Set what `meter` counts of parameters and hints."""
        meter.put(IGNORED_PARAMETERS, self.ignored)
        for (action, result), count in self.hints.items():
            meter.put(HINTS, count, action, result.value)

    def _follow(self, hint: Hint, options: dict[str, Any]) -> None:
        """Set the option of a hint, unless it is set."""
        if hint.option in options:
            return
        result = hint.result
        if hint.option in self._unsupported or (hint.option and hint.option not in self._names):
            result = HintResult.UNSUPPORTED
        elif hint.option:
            options[hint.option] = hint.value
        if hint.action:
            self.hints[hint.action, result] += 1

    def _read_own(self, request_id: str, params: Mapping[Any, Any]) -> dict[str, Any]:
        """The options that have FlexKV's own names."""
        options: dict[str, Any] = {}
        bad: list[tuple[str, str]] = []
        for key, value in params.items():
            if not isinstance(key, str) or key[: len(PREFIX)].lower() != PREFIX:
                continue
            name = key.removeprefix(PREFIX)
            if name not in self._names:
                keys = ", ".join(PREFIX + each for each in self._names) or "none"
                if name in self._followed:
                    keys += " (setting request_options)"
                bad.append((f"has {_shown(key)}: {_shown(value)}", keys))
                continue
            read, allowed = _PARAMETERS[name]
            try:
                found = read(value)
            except ValueError:
                found = None
            hint = found
            if not isinstance(hint, Hint):
                hint = Hint(_HINTS.get(name, ""), HintResult.ACCEPTED, name, found)
            elif isinstance(value, str):
                hint = None  # other forms alone have units
            if hint is None or hint.value is None:
                bad.append((f"has {key}: {_shown(value)}", allowed))
            else:
                self._follow(hint, options)
        if bad:
            self._ignore(request_id, len(bad), *bad[0])
        return options

    def _ignore(self, request_id: str, count: int, first: str, allowed: str) -> None:
        """Count wrong parameters of a request, and log the first of them in one line."""
        self.ignored += count
        self._warnings += 1
        if self._warnings <= _WARNINGS:
            logger.warning(
                "%s of request %s %s, which is ignored%s; allowed: %s%s",
                self._field,
                request_id,
                first,
                f", like {count - 1} more" if count > 1 else "",
                allowed,
                "" if self._warnings < _WARNINGS else " (later requests are only counted)",
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
