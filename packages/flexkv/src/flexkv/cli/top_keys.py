# SPDX-License-Identifier: Apache-2.0
"""The keys that `flexkv top` obeys, read without Enter and without an echo."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

_QUIT = b"qQ"


class Keys:
    """Keys from standard input. If that is no terminal, no key ever comes.

    Args:
        fd: descriptor of the terminal; borrowed. None if there is no terminal.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def quit_within(self, seconds: float) -> bool:
        """Wait for the key q, for at most `seconds` seconds. Returns whether the user pressed it.

        Raises:
            KeyboardInterrupt: the user presses Ctrl-C.
        """
        deadline = time.monotonic() + seconds
        while self._fd is not None:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._fd], [], [], left)[0]:
                return False
            keys = _read(self._fd)
            if any(key in _QUIT for key in keys):
                return True
            if not keys:
                self._fd = None  # the terminal is gone
        time.sleep(max(0.0, deadline - time.monotonic()))
        return False


@contextlib.contextmanager
def open_keys() -> Iterator[Keys]:
    """Read keys without Enter and without an echo until the context ends. Then the terminal gets
    its old modes back."""
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        yield Keys(None)
        return
    modes = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield Keys(fd)
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, modes)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 64)
    except OSError:
        return b""
