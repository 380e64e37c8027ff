# SPDX-License-Identifier: Apache-2.0
"""Asks a service that runs, as an operator; see `flexkv.service.door`."""

from __future__ import annotations

import http.client
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote

import msgspec

from flexkv.service.state import SOCKET, Cleared, ServiceState
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.tiers.disk.files import reason_of
from flexkv.types.errors import ArenaError

_CALL_SECONDS = 5.0
"""Time limit for an answer: more than the service's loop may take. Not tuned."""


Told = TypeVar("Told", ServiceState, Cleared)


class ServiceError(Exception):
    """A service gives no answer. The message names the reason."""


def is_service(root: str) -> bool:
    """Whether a directory is that of a service that runs, or was killed.

    Raises:
        OSError: it cannot be read.
    """
    return RuntimeDirectory.has_socket(root, SOCKET)


def metrics_of(root: str) -> bytes:
    """The metrics of the service in a directory, in Prometheus's text format.

    Raises:
        ServiceError: it does not answer.
    """
    return _ask(root, "GET", "/metrics")


def state_of(root: str) -> ServiceState:
    """The state of the service in a directory.

    Raises:
        ServiceError: it does not answer, or is of another version.
    """
    return _decoded(root, _ask(root, "GET", "/state"), ServiceState)


def clear_pools(root: str, fingerprint: str | None) -> Cleared:
    """Have the service in a directory drop the blocks of its memory and of its disks.

    Args:
        root: the directory.
        fingerprint: of the pool; None for all.

    Raises:
        ServiceError: it does not answer, or has no such pool.
    """
    query = "" if fingerprint is None else f"?fingerprint={quote(fingerprint)}"
    return _decoded(root, _ask(root, "POST", f"/clear{query}"), Cleared)


def _decoded(root: str, answer: bytes, kind: type[Told]) -> Told:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise ServiceError(
            f"the service in {root!r} answers as another version of FlexKV does: {error}"
        ) from None


def _ask(root: str, method: str, path: str) -> bytes:
    connection = _Connection(root)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        content = answer.read()
    except (FileNotFoundError, ConnectionRefusedError):
        raise ServiceError(f"no service of FlexKV runs in {root!r}") from None
    except (OSError, ArenaError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise ServiceError(f"the service in {root!r} does not answer: {reason}") from None
    except http.client.HTTPException as error:
        raise ServiceError(
            f"the service in {root!r} answers with something else than HTTP: {error!r}"
        ) from None
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK:
        raise ServiceError(f"the service in {root!r}: {content.decode(errors='replace').strip()}")
    return content


class _Connection(http.client.HTTPConnection):
    def __init__(self, root: str) -> None:
        super().__init__("localhost", timeout=_CALL_SECONDS)
        self._root = root

    def connect(self) -> None:
        """To the socket in the directory, whose owner must be this user."""
        with RuntimeDirectory(self._root) as directory:
            self.sock = directory.connect(SOCKET, _CALL_SECONDS)
