# SPDX-License-Identifier: Apache-2.0
"""Asks a process that has a door in its runtime directory, or all engines there."""

from __future__ import annotations

import functools
import http.client
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from flexkv.operators.verbs import OperatorQuestion, Verb
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.session.state_reports import Subject, process_of, read_states
from flexkv.tiers.disk.files import reason_of
from flexkv.types.deadline import HungError, call_beside
from flexkv.types.errors import ArenaError, ConfigError
from flexkv.types.texts import printable

CALL_SECONDS = 5.0
"""Time limit for an answer: more than the loop of a service may take."""
_ENGINE_SECONDS = 120.0
"""Time limit for the answer of an engine, which hashes long prompts beside its work, and waits for
lower tiers for a minute at most."""

_Asked = TypeVar("_Asked", bound=OperatorQuestion)
_Said = TypeVar("_Said")


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
    """Ask at a socket of the runtime directory `root`, by method and path, and return the content
    of the answer. `seconds` is the time limit of each part of the answer; `whom` is for errors.
    Raises AskError if there is no answer, or it is a refusal."""
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


def ask_engines(
    root: str, fingerprint: str | None, verb: Verb[_Asked, _Said], question: _Asked
) -> tuple[list[_Said], list[str]]:
    """Ask this user's running engines in a runtime directory, all or those of a fingerprint.
    Returns the answers, and why other engines give none. Raises ConfigError if the directory cannot
    be read."""
    return beside(root, functools.partial(_ask_engines, root, fingerprint, verb, question))


def engines_in(root: str, fingerprint: str | None) -> list[str]:
    """The names of the engines that `ask_engines` asks, for people. Raises AskError if there is
    none, ConfigError if the directory cannot be read."""
    return [name for name, _ in beside(root, functools.partial(_doors, root, fingerprint))]


def beside(root: str, call: Callable[[], _Said]) -> _Said:
    """Make a call that reads a runtime directory, for as long as it answers. Raises ConfigError if
    the directory cannot be read."""
    try:
        return call_beside(root, call)
    except (ArenaError, HungError) as error:
        raise ConfigError(str(error)) from None


def _ask_engines(
    root: str, fingerprint: str | None, verb: Verb[Any, _Said], question: OperatorQuestion
) -> tuple[list[_Said], list[str]]:
    body = msgspec.json.encode(question)
    answers: list[_Said] = []
    failed: list[str] = []
    try:
        doors = _doors(root, fingerprint)
    except AskError as error:
        return [], [str(error)]
    for name, door in doors:
        try:
            if not door:
                raise AskError(f"the {name}, has no door; see its log")
            content = ask(
                root, door, f"{name},", ("POST", verb.path), body, seconds=_ENGINE_SECONDS
            )
            answers.append(msgspec.json.decode(content, type=verb.answer))
        except AskError as error:
            failed.append(printable(str(error)))
        except msgspec.DecodeError as error:
            failed.append(f"{name}, answers as another version of FlexKV does: {error}")
    return answers, failed


def _doors(root: str, fingerprint: str | None) -> list[tuple[str, str]]:
    """Name and socket of each engine's door. Raises AskError if there is no engine."""
    reports = read_states(root, Subject.HEALTH)
    doors = []
    for report in reports:
        if fingerprint in (None, report.get("fingerprint")):
            name = f"engine {report.get('engine')}, process {process_of(report)}"
            doors.append((printable(name), str(report.get("door") or "")))
    if doors:
        return doors
    if fingerprint is None or not reports:
        raise AskError(f"no engine with FlexKV runs in {root!r}")
    known = ", ".join(sorted({str(each.get("fingerprint")) for each in reports}))
    raise AskError(printable(f"no engine has the fingerprint {fingerprint!r}; allowed: {known}"))
