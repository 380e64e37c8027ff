# SPDX-License-Identifier: Apache-2.0
"""Engines that start together see what memory each of them is about to take.

    <16 hex digits>.memory    bytes that a starting process still takes, as JSON; it holds its lock

Without it, each would find the memory free that all of them are about to fill. The directory's lock
lets one process plan at a time. The file ends with the start, and with the process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from flexkv.host import arena
from flexkv.session.held_files import HeldFile, read_held
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.system.available import Promise, memory_groups
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

_SUFFIX = ".memory"


class Reservation(arena.Reservation):
    """The part of one process. If the runtime directory cannot be used, this logs a warning, and no
    process sees another."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._file = HeldFile(root, _SUFFIX)
        self._groups = memory_groups()
        self._directory: RuntimeDirectory | None = None
        self._left = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[Sequence[Promise]]:
        with contextlib.ExitStack() as stack:
            promised: list[Promise] = []
            try:
                directory = stack.enter_context(RuntimeDirectory(self._root, create=True))
                stack.enter_context(directory.locked())
                promised = list(_promises(directory))
                self._directory = directory
            except (OSError, ArenaError) as error:
                self._warn(error)
            try:
                yield promised
            finally:
                self._directory = None

    def promise(self, size: int) -> None:
        self._left = size
        if self._directory is not None:
            try:
                self._file.create(self._directory)
                self._write()
            except OSError as error:
                self._warn(error)

    def filled(self, size: int) -> None:
        self._left = max(0, self._left - size)
        if self._file.exists:
            # The promise stays too high, at worst until the start has ended.
            with contextlib.suppress(OSError):
                self._write()

    def close(self) -> None:
        """End the promise. Idempotent."""
        self._file.close()

    def _write(self) -> None:
        self._file.write({"bytes": self._left, "groups": sorted(self._groups)})

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "engines that start together cannot see each other's memory: %s; FlexKV starts; set "
            "cpu_cache_gb so that all of them fit",
            error,
        )


def _promises(directory: RuntimeDirectory) -> Iterator[Promise]:
    for each in read_held(directory, _SUFFIX):
        size, groups = each.get("bytes"), each.get("groups")
        if isinstance(size, int) and isinstance(groups, list):  # else of another version
            yield Promise(size, frozenset(map(str, groups)))
