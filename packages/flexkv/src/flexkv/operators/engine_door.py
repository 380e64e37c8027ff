# SPDX-License-Identifier: Apache-2.0
"""The doors of an engine: a socket in the runtime directory, and a port of this machine for those
who know a token.

Threads of the doors answer, also while the engine is idle. See
`flexkv.engine.scheduler.operator_calls` for the answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from flexkv.operators.door import JSON, Door, DoorRequest, listen_at, routes_of
from flexkv.operators.verbs import Answers, PromptQuestion, RefusedError, SilentError, describe
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.settings import CacheConfig
from flexkv.system.forks import close_in_children
from flexkv.types.errors import ArenaError, ConfigError

logger = logging.getLogger(__name__)

PART_BLOCKS = 64
"""Blocks of a part: their hashes take vLLM 0.3 ms."""

_HOST = "127.0.0.1"
_POLL_SECONDS = 1.0
"""Pause between two polls of an idle engine's cache."""
_MOST_BYTES = 4096
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


class PromptKeys(Protocol):
    """Makes the keys of a prompt that is no request. Any thread may call it."""

    @property
    def block_tokens(self) -> int: ...

    def count(self, question: PromptQuestion) -> int:
        """The number of whole blocks of a prompt."""
        ...

    def parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        """The keys of these blocks, in order, about `PART_BLOCKS` at a time."""
        ...

    def others(
        self, question: PromptQuestion, blocks: int | None = None
    ) -> Iterator[Sequence[bytes]]:
        """The keys of blocks that a hit needs besides: those of the model's other KV cache groups,
        for a hit of so many whole blocks. None for all blocks of the prompt in these groups."""
        ...


class LocalHttp(NamedTuple):
    """Where to answer by HTTP, and the token that a peer must send."""

    port: int
    token: str


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """How operators reach an engine's cache: what makes the keys of prompts that are no requests,
    and a port of this machine at which they ask, too; None for none."""

    keys: PromptKeys
    http: LocalHttp | None = None


def local_http(config: CacheConfig) -> LocalHttp | None:
    """The port that the settings name; None if no port is wanted. Raises ConfigError if the file
    has no token, or others could read it."""
    port, path = config.control_port, config.control_token_file
    if port is None or path is None:
        return None  # settings that are read have both or none
    try:
        token = _read(path)
    except OSError as error:
        raise _refused(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise _refused(path, "is no text") from None
    if not _TOKEN.fullmatch(token):
        raise _refused(path, "has no such token")
    return LocalHttp(port, token)


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _refused(path, "is no file of this user")
        if status.st_mode & 0o077:
            raise _refused(path, f"has mode {status.st_mode & 0o777:o}, and others may read it")
        return os.read(fd, _MOST_BYTES).decode("ascii").strip()
    finally:
        os.close(fd)


def _refused(path: str, problem: str) -> ConfigError:
    return ConfigError(
        f"control_token_file {path!r} {problem}; allowed: a file of this user with mode 0600 that "
        "has a token of 16 to 512 letters, digits and ._~+/=-, as of `openssl rand -hex 32`"
    )


class EngineDoor:
    """The doors of one engine: a socket in the runtime directory `root`, and a port, if there is
    one. `poll` is called once a second until `close`, so that old blocks leave the cache while the
    engine is idle; None if no block leaves by its age. `name` is that of the socket; it is empty if
    the socket could not be opened, which is logged. The engine works without it."""

    def __init__(
        self,
        root: str,
        http: LocalHttp | None,
        answers: Answers,
        poll: Callable[[], None] | None = None,
    ) -> None:
        self._root = root
        self._ended = threading.Event()
        if poll is not None:
            threading.Thread(
                target=self._poll_idle, args=(poll,), name="flexkv-ages", daemon=True
            ).start()
        self._door: Door | None = None
        self._port = None if http is None else _open_port(http, answers)
        self.name = ""
        name = f"flexkv engine {secrets.token_hex(8)}"
        try:
            with RuntimeDirectory(root, create=True) as directory:
                listener = directory.listen(name)
        except (OSError, ArenaError) as error:
            logger.warning("this engine has no door for flexkv lookup: %s", error)
            return
        self._door = Door(listener, routes_of(answers), is_open=False)
        self.name = name
        close_in_children(self._door)

    def close(self) -> None:
        """Answer no more, and begin no further poll. Does not wait for a poll that waits for its
        turn: the caller may have the turn. Idempotent."""
        self._ended.set()
        port, self._port = self._port, None
        if port is not None:
            port.close()
        door, self._door = self._door, None
        if door is None:
            return
        try:
            with RuntimeDirectory(self._root) as directory:
                directory.remove(self.name)
        except (OSError, ArenaError) as error:
            logger.debug("the socket of the engine's door stays: %s", error)
        door.close()

    def _poll_idle(self, poll: Callable[[], None]) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            with contextlib.suppress(SilentError, RefusedError):
                poll()


def _open_port(http: LocalHttp, answers: Answers) -> Door | None:
    described = msgspec.json.encode(describe(answers))
    try:
        listener = listen_at(_HOST, http.port)
    except OSError as error:
        logger.warning(
            "control_port %d cannot be used (%s); this engine answers operators by its socket "
            "only; choose another port for it",
            http.port,
            os.strerror(error.errno or 0),
        )
        return None

    def openapi(_: DoorRequest) -> tuple[bytes, str]:
        return described, JSON

    shown = {("GET", "/openapi.json"): openapi, **routes_of(answers)}
    door = Door(listener, shown, is_open=True, token=http.token)
    close_in_children(door)
    logger.info("operators can ask this engine at http://%s:%d", _HOST, http.port)
    return door
