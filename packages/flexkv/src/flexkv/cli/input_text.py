# SPDX-License-Identifier: Apache-2.0
"""The text that a command is given as a file, or by a pipe."""

from __future__ import annotations

import errno
import sys

STDIN = "-"
"""Stands for standard input in place of a file."""

_MOST_BYTES = 64 << 20
"""The longest input. Not tuned."""


def read_input(path: str) -> str:
    """The text of a file, or of standard input. Waits for whoever writes to a pipe.

    Raises:
        OSError: it cannot be read, or is too large.
        UnicodeDecodeError: it is not UTF-8.
    """
    if path == STDIN:
        data = sys.stdin.buffer.read(_MOST_BYTES + 1)
    else:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {_MOST_BYTES} bytes")
    return data.decode("utf-8")
