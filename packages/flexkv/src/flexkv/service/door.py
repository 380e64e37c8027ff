# SPDX-License-Identifier: Apache-2.0
"""What the service answers to operators, on a socket in its directory, and on a port if one is
wanted. The port shows figures only.

    GET /metrics    the metrics, in Prometheus's text format
    GET /health     200 with what is wrong, or 503 if the service's loop does not answer
    GET /state      `ServiceState`; on the socket only
    POST /clear     clear pools, `?fingerprint=` for one; `Cleared`; on the socket only
    POST /lookup    `PromptQuestion`, to pools as above; `AllPlaces`; on the socket only

Threads of the door answer. What they say of the service its loop tells them, within
`_LOOP_SECONDS`. So nobody who asks can delay an engine by more than one such look.
"""

from __future__ import annotations

import socket
from typing import Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from flexkv.control.http_door import (
    JSON,
    TEXT,
    Door,
    DoorRequest,
    RefusedError,
    Routes,
    SilentError,
)
from flexkv.control.prompts import AllPlaces, PromptQuestion, read_question
from flexkv.service.pool_metrics import exposition
from flexkv.service.state import Cleared, ServiceState
from flexkv.settings import CacheConfig

_LOOP_SECONDS = 2.0
"""Seconds within which the service's loop must answer. It mostly takes milliseconds. Not tuned."""


class SilentLoopError(SilentError):
    """The service's loop has not come to a request in time."""

    def __init__(self) -> None:
        super().__init__(f"the loop of the service has not answered for {_LOOP_SECONDS:g} s")


class Served(Protocol):
    """What the door asks of the service. All calls come in threads of the door, and wait for the
    service's loop for so many seconds."""

    config: CacheConfig

    def state(self, seconds: float) -> ServiceState:
        """The state now; raises SilentLoopError."""
        ...

    def clear(self, fingerprint: str | None, seconds: float) -> Cleared:
        """Clear the pool of a fingerprint, or all pools; raises SilentLoopError, RefusedError."""
        ...

    def lookup(
        self, question: PromptQuestion, fingerprint: str | None, seconds: float
    ) -> AllPlaces:
        """What the pool of a fingerprint, or each pool, has of a prompt; raises as `clear`."""
        ...


def operator_door(listener: socket.socket, served: Served, *, figures_only: bool) -> Door:
    """Answer on a listening socket.

    Args:
        listener: of SOCK_STREAM; owned by the door.
        served: answers for the service.
        figures_only: whether peers may be any process of the network. Else they are this user's,
            and may clear the service.
    """
    return Door(listener, _routes(served, figures_only), is_open=figures_only)


def _routes(served: Served, figures_only: bool) -> Routes:
    def metrics(_: DoorRequest) -> tuple[bytes, str]:
        return exposition(served.state(_LOOP_SECONDS), served.config), CONTENT_TYPE_LATEST

    def health(_: DoorRequest) -> tuple[bytes, str]:
        text = "\n".join(served.state(_LOOP_SECONDS).problems) or "ok"
        return f"{text}\n".encode(), TEXT

    def state(_: DoorRequest) -> tuple[bytes, str]:
        return msgspec.json.encode(served.state(_LOOP_SECONDS)), JSON

    def clear(asked: DoorRequest) -> tuple[bytes, str]:
        chosen = asked.query.get("fingerprint")
        if not chosen:
            raise RefusedError("fingerprint is missing; allowed: a fingerprint, or all")
        cleared = served.clear(None if chosen == "all" else chosen, _LOOP_SECONDS)
        return msgspec.json.encode(cleared), JSON

    def lookup(asked: DoorRequest) -> tuple[bytes, str]:
        question = read_question(asked.body)
        found = served.lookup(question, asked.query.get("fingerprint"), _LOOP_SECONDS)
        return msgspec.json.encode(found), JSON

    shown = {("GET", "/metrics"): metrics, ("GET", "/health"): health}
    if figures_only:
        return shown
    return shown | {
        ("GET", "/state"): state,
        ("POST", "/clear"): clear,
        ("POST", "/lookup"): lookup,
    }
