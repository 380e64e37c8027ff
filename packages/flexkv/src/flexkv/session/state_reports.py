# SPDX-License-Identifier: Apache-2.0
"""Running engines report states in files of the runtime directory.

    <16 hex digits>.store     one shared store of one engine, as JSON; the engine holds its lock
    <16 hex digits>.health    the health of one engine's cache, likewise

See `held_files` for those of killed engines.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
from collections.abc import Callable, Mapping

from flexkv.session.held_files import HeldFile, read_held
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.system.processes import pid_namespace, process_text
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Seconds between two updates of the file, the most that a reader sees it late."""


class Subject(enum.StrEnum):
    """What a report is about. The values are the suffixes of the files."""

    STORE = ".store"
    HEALTH = ".health"


_SHOWN = {
    Subject.STORE: "the shared stores of flexkv stat",
    Subject.HEALTH: "the output of flexkv health",
}


class StateReport:
    """Keeps one report up to date, from a thread of its own because the engine may be idle.

    If the file cannot be created, this logs a warning, and retries with each update. The engine
    works without it. `about` has the fields that do not change. Together with the states they fit
    into 4 KiB of JSON.
    """

    def __init__(
        self, root: str, about: Mapping[str, str], subject: Subject = Subject.STORE
    ) -> None:
        self._root = root
        self._about = {"pid": os.getpid(), "pid_namespace": pid_namespace(), **about}
        self._subject = subject
        self._file = HeldFile(root, subject)
        self._read: Callable[[], Mapping[str, object]] = dict
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, read: Callable[[], Mapping[str, object]]) -> None:
        """Report the states that `read` returns, called from another thread, until `close`."""
        self._read = read
        try:
            self._update()
        except (OSError, ArenaError) as error:
            logger.warning(
                "this engine is missing in %s: %s; FlexKV retries", _SHOWN[self._subject], error
            )
        self._thread = threading.Thread(target=self._run, name="flexkv-states", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Report the states now."""
        # Whatever it is, such as a full disk: the next update tries again. If the thread ended, the
        # last states would be shown for ever.
        with contextlib.suppress(Exception):
            self._update()

    def close(self) -> None:
        """End the thread and remove the file. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._file.close()

    def _run(self) -> None:
        while not self._ended.wait(SECONDS):
            self.update()

    def _update(self) -> None:
        with self._guard:
            if not self._file.exists:
                with RuntimeDirectory(self._root, create=True) as directory, directory.locked():
                    self._file.create(directory)
            self._file.write({**self._about, **self._read()})


def read_states(root: str, subject: Subject = Subject.STORE) -> list[dict[str, object]]:
    """Read the reports of this user's running engines, in no particular order. A missing runtime
    directory gives no reports. Raises ArenaError if it cannot be used."""
    try:
        with RuntimeDirectory(root) as directory:
            return list(read_held(directory, subject))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArenaError(
            f"runtime_dir {root!r} cannot be read: {error}; allowed: a directory of this user"
        ) from None


def process_of(report: Mapping[str, object]) -> str:
    """The process id of a report's engine, for people."""
    return process_text(report.get("pid"), report.get("pid_namespace"))
