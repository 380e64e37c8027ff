# SPDX-License-Identifier: Apache-2.0
"""A terminal on which a command runs."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import termios
import time
from collections.abc import Iterator

from packages.conftest import PATIENCE_SECONDS
from packages.flexkv.tests.cli.command import Fork, Patch


class Screen:
    """A terminal on which a command runs.

    Attributes:
        first_modes: modes of the terminal before the command began.
    """

    def __init__(self, process: Fork, master: int, slave: int, first_modes: list[object]) -> None:
        self.first_modes = first_modes
        self._process, self._master, self._slave = process, master, slave
        self._shown = ""

    @property
    def modes(self) -> list[object]:
        """Of the terminal."""
        return termios.tcgetattr(self._slave)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Until the command has printed it since the last call."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := re.search(pattern, self._shown)):
            assert time.monotonic() < deadline, self._shown[-3000:]
            if select.select([self._master], [], [], 1.0)[0]:
                self._shown += os.read(self._master, 1 << 16).decode(errors="replace")
        self._shown = self._shown[found.end() :]
        return found

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def end_by_key(self, key: str) -> int:
        """Press a key that ends the command; returns the exit code."""
        self.press(key)
        return self._end()

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self._process.send_signal(signal.SIGINT)
        return self._end()

    def end(self) -> str:
        """Wait for the end of a command that ends by itself; returns all that it has printed."""
        printed = b""
        while (ended := self._process.poll()) is None or self._is_ready():
            if self._is_ready():
                printed += os.read(self._master, 1 << 16)
        assert ended == 0, printed
        return printed.decode()

    def _is_ready(self) -> bool:
        return bool(select.select([self._master], [], [], 0.1)[0])

    def _end(self) -> int:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (code := self._process.poll()) is None:
            assert time.monotonic() < deadline, "the command does not end"
            # A command that prints its last view waits for a reader.
            if select.select([self._master], [], [], 0.1)[0]:
                os.read(self._master, 1 << 16)
        return code


@contextlib.contextmanager
def on_terminal(
    *arguments: str, columns: int = 200, patch: Patch = contextlib.nullcontext
) -> Iterator[Screen]:
    """Runs `flexkv` on a terminal of so many columns; ends it in any case. `patch` as of `Fork`."""
    master, slave = pty.openpty()
    first_modes = termios.tcgetattr(slave)
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"}
    environment.pop("NO_COLOR", None)
    process = Fork(
        *arguments,
        environ=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        patch=patch,
        new_session=True,
    )
    try:
        yield Screen(process, master, slave, first_modes)
    finally:
        process.kill()
        os.close(master)
        os.close(slave)
