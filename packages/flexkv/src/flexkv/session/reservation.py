# SPDX-License-Identifier: Apache-2.0
"""Engines that start together see what memory each of them is about to take.

    <16 hex digits>.memory    bytes that a starting process still takes, as JSON; it holds its lock

Without it, each would find the memory free that all of them are about to fill. The directory's lock
lets one process plan at a time. The file ends with the start, and with the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence

from flexkv.session.held_files import create_held, read_held, write_held
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.system.available import Promise, memory_groups
from flexkv.system.forks import close_in_children
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

_SUFFIX = ".memory"


class Reservation:
    """The part of one process. See `flexkv.host.arena.Reservation`.

    If the runtime directory cannot be used, this logs a warning, and no process sees another.

    Args:
        root: path of the runtime directory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._name = secrets.token_hex(8) + _SUFFIX
        self._groups = sorted(memory_groups())
        self._directory: RuntimeDirectory | None = None
        self._fd = -1
        self._left = 0
        close_in_children(self)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Sequence[Promise]]:
        """Let no other process plan during the block.

        Yields:
            The promises of all other processes of this user.
        """
        with contextlib.ExitStack() as stack:
            promised: list[Promise] = []
            try:
                directory = stack.enter_context(RuntimeDirectory(self._root, create=True))
                stack.enter_context(directory.locked())
                promised = list(_promises(read_held(directory.descriptor, _SUFFIX)))
                self._directory = directory
            except (OSError, ArenaError) as error:
                self._warn(error)
            try:
                yield promised
            finally:
                self._directory = None

    def promise(self, size: int) -> None:
        """Show other processes, within a turn, that this one is about to take `size` bytes."""
        self._left = size
        if self._directory is not None:
            try:
                self._fd = create_held(self._directory.descriptor, self._name)
                self._write()
            except OSError as error:
                self._warn(error)

    def filled(self, size: int) -> None:
        """Take `size` bytes off the promise, because this process has them now."""
        self._left = max(0, self._left - size)
        if self._fd >= 0:
            # The promise stays too high, at worst until the start has ended.
            with contextlib.suppress(OSError):
                self._write()

    def close(self) -> None:
        """End the promise. Idempotent."""
        if self._fd >= 0:
            with (
                contextlib.suppress(OSError, ArenaError),
                RuntimeDirectory(self._root) as directory,
            ):
                os.unlink(self._name, dir_fd=directory.descriptor)
            self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """See `flexkv.system.forks.Owner`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        content = {"bytes": self._left, "groups": self._groups}
        write_held(self._fd, json.dumps(content).encode())

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "engines that start together cannot see each other's memory: %s; FlexKV starts; set "
            "cpu_cache_gb so that all of them fit",
            error,
        )


def _promises(contents: Iterable[bytes]) -> Iterator[Promise]:
    for each in contents:
        # A process has created its file and written nothing yet, or is of another version.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            content = json.loads(each)
            yield Promise(int(content["bytes"]), frozenset(map(str, content["groups"])))
