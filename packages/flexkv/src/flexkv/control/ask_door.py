# SPDX-License-Identifier: Apache-2.0
"""Asks a process that has a door in its runtime directory."""

from __future__ import annotations

import http.client
from http import HTTPStatus

from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.tiers.disk.files import reason_of
from flexkv.types.errors import ArenaError

CALL_SECONDS = 5.0
"""Time limit for an answer: more than the loop of a service may take. Not tuned."""


class AskError(Exception):
    """A process gives no answer. The message names the reason."""


def ask(
    root: str,
    socket: str,
    whom: str,
    question: tuple[str, str],
    body: bytes = b"",
    *,
    seconds: float = CALL_SECONDS,
) -> bytes:
    """Ask, and return the content of the answer.

    Args:
        root: path of the runtime directory.
        socket: name of the socket there.
        whom: whom this asks, for errors.
        question: method and path.
        body: what follows them.
        seconds: time limit of each part of the answer.

    Raises:
        AskError: there is no answer, or it is a refusal.
    """
    connection = _Connection(root, socket, seconds)
    try:
        connection.request(*question, body=body or None)
        answer = connection.getresponse()
        content = answer.read()
    except (FileNotFoundError, ConnectionRefusedError):
        raise AskError(f"no {whom} runs in {root!r}") from None
    except (OSError, ArenaError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise AskError(f"the {whom} in {root!r} does not answer: {reason}") from None
    except http.client.HTTPException as error:
        raise AskError(
            f"the {whom} in {root!r} answers with something else than HTTP: {error!r}"
        ) from None
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK:
        raise AskError(f"the {whom} in {root!r}: {content.decode(errors='replace').strip()}")
    return content


class _Connection(http.client.HTTPConnection):
    def __init__(self, root: str, socket: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._root, self._socket, self._seconds = root, socket, seconds

    def connect(self) -> None:
        """To the socket in the directory, whose owner must be this user."""
        with RuntimeDirectory(self._root) as directory:
            self.sock = directory.connect(self._socket, self._seconds)
