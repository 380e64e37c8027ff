# SPDX-License-Identifier: Apache-2.0
"""A user's options for one request, from a dictionary of the request.

Wrong parameters are logged in one line and ignored: the request is served either way. FlexKV
ignores the keys of other connectors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flexkv.engine.choice.load_choice import LoadMode
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.eviction import RequestContext
from flexkv.settings import MOST_PIN_SECONDS

logger = logging.getLogger(__name__)

PREFIX = "flexkv."
_SHOWN_CHARACTERS = 80
"""The most characters of a key or value in the log, since any client may send them."""
_WARNINGS = 100
"""Requests that the log names, one line each, for the same reason; later ones are only counted."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request.

    Attributes:
        load: whether cached blocks may be loaded for it.
        store: whether its blocks are cached.
        max_load_tokens: the most tokens to load; None for no limit.
        pin: whether its blocks stay in host memory; see `CacheClient.pin`.
        pin_seconds: time until the pin ends; None for the setting's.
        pin_name: name of the pin, within the same cache salt.
        unpin: whether to end the earlier pins of that name.
        load_mode: overrides the setting, unless that is `async`; None for the setting's.
        session: name of the conversation, within the same cache salt; empty if not named.
        returns: whether a prompt that begins with this one is expected soon; None if not said.
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


NONE = RequestOptions()


class Role(NamedTuple):
    """What the engine may do with blocks; options of requests only restrict it further.

    Attributes:
        loads: whether it loads blocks.
        stores: whether it stores blocks.
    """

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
    if isinstance(value, str) and 0 < len(value) <= _NAME_CHARACTERS:
        return value
    raise ValueError


_NAME_CHARACTERS = 64
"""The longest name of pins or of a conversation; a UUID has 36 characters. Not tuned."""
_FLAG = "true or false"
_PARAMETERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "load": (_read_flag, _FLAG),
    "store": (_read_flag, _FLAG),
    "max_load_tokens": (_read_count, "a whole number from 0 on"),
    "pin": (_read_flag, _FLAG),
    "pin_seconds": (_read_seconds, f"a number above 0, up to {MOST_PIN_SECONDS}"),
    "pin_name": (_read_name, f"a text of 1 to {_NAME_CHARACTERS} characters"),
    "unpin": (_read_flag, _FLAG),
    "load_mode": (LoadMode, ", ".join(mode.value for mode in LoadMode)),
    "session": (_read_name, f"a text of 1 to {_NAME_CHARACTERS} characters"),
    "returns": (_read_flag, _FLAG),
}
"""For each parameter the function that reads its value or raises ValueError, and the allowed
values, for errors."""


def pin_owner(request: EngineRequest, options: RequestOptions) -> tuple[str, str]:
    """The owner of a request's pins: each cache salt has names of its own."""
    return _salt_of(request), options.pin_name


def context_of(request: EngineRequest, options: RequestOptions, hit_tokens: int) -> RequestContext:
    """Make the context of a request for an eviction policy.

    Args:
        request: the engine's request.
        options: its options. The names of sessions are separate for each cache salt.
        hit_tokens: tokens of its prompt that were found.
    """
    session = tenant_session(_salt_of(request), options.session)
    return RequestContext(
        request.num_prompt_tokens, hit_tokens, request.request_id, session, options.returns
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
        role: of the engine.

    Attributes:
        ignored: number of parameters that were not understood so far.
    """

    def __init__(
        self,
        allowed: Collection[str] | None = None,
        names: Collection[str] | None = None,
        field: str = "kv_transfer_params",
        role: Role = BOTH,
    ) -> None:
        self.ignored = 0
        self._followed = _PARAMETERS if names is None else names
        self._names = [name for name in self._followed if allowed is None or name in allowed]
        self._field = field
        self._role = role
        self._warnings = 0

    def of(self, request: EngineRequest) -> RequestOptions:
        """The options of `request`."""
        return self.read(request.request_id, getattr(request, "kv_transfer_params", None))

    def read(self, request_id: str, params: object) -> RequestOptions:
        """The options of the request of that id, from its dictionary of parameters."""
        return self._role.limit(self._read(request_id, params))

    def _read(self, request_id: str, params: object) -> RequestOptions:
        if not params:
            return NONE
        if not isinstance(params, Mapping):
            self._ignore(request_id, 1, f"is {_shown(params)}", "a dictionary")
            return NONE
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
                options[name] = read(value)
            except ValueError:
                bad.append((f"has {key}: {_shown(value)}", allowed))
        if bad:
            self._ignore(request_id, len(bad), *bad[0])
        return RequestOptions(**options)

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
