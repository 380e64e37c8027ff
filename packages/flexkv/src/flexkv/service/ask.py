# SPDX-License-Identifier: Apache-2.0
"""Asks a service that runs, as an operator; see `flexkv.service.endpoints`."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote

import msgspec

from flexkv.operators.answers import CLEAR_SECONDS
from flexkv.operators.ask_door import CALL_SECONDS, AskError, ask
from flexkv.operators.verbs import AllPlaces, PromptQuestion
from flexkv.service.state import SOCKET, Cleared, ServiceState
from flexkv.session.runtime_directory import RuntimeDirectory

Told = TypeVar("Told", ServiceState, Cleared, AllPlaces)


def is_service(root: str) -> bool:
    """Whether a directory is that of a service that runs, or was killed. Raises OSError if it
    cannot be read."""
    return RuntimeDirectory.has_socket(root, SOCKET)


def metrics_of(root: str) -> bytes:
    """The metrics of the service in a directory, in Prometheus's text format. Raises AskError
    if it does not answer."""
    return _ask(root, "GET", "/metrics")


def state_of(root: str) -> ServiceState:
    """The state of the service in a directory. Raises AskError if it does not answer, or is of
    another version."""
    return _decoded(root, _ask(root, "GET", "/state"), ServiceState)


def clear_pools(root: str, fingerprint: str | None) -> Cleared:
    """Have the service in a directory drop the blocks of its memory and of its disks: of the pool
    of a fingerprint, or of all. Raises AskError if it does not answer, or has no such pool."""
    query = f"?fingerprint={quote(fingerprint or 'all')}"
    return _decoded(root, _ask(root, "POST", f"/clear{query}", seconds=CLEAR_SECONDS), Cleared)


def find_prompt(root: str, question: PromptQuestion, fingerprint: str | None) -> AllPlaces:
    """Where the pools of the service in a directory, or the one of a fingerprint, have the blocks
    of a prompt. Raises AskError if it does not answer, or has no such pool."""
    query = "" if fingerprint is None else f"?fingerprint={quote(fingerprint)}"
    body = msgspec.json.encode(question)
    return _decoded(root, _ask(root, "POST", f"/lookup{query}", body), AllPlaces)


def _decoded(root: str, answer: bytes, kind: type[Told]) -> Told:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise AskError(
            f"the service in {root!r} answers as another version of FlexKV does: {error}"
        ) from None


def _ask(
    root: str, method: str, path: str, body: bytes = b"", seconds: float = CALL_SECONDS
) -> bytes:
    return ask(root, SOCKET, "service of FlexKV", (method, path), body, seconds=seconds)
