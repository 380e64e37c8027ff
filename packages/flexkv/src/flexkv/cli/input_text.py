# SPDX-License-Identifier: Apache-2.0
"""The text that a command is given as a file, or by a pipe."""

from __future__ import annotations

import errno
import sys

STDIN = "-"
"""Stands for standard input in place of a file."""


def read_input(path: str, most_bytes: int) -> str:
    """The text of a file that the command line names, or of standard input. Waits for whoever
    writes to a pipe.

    Args:
        path: of the file, or `STDIN`.
        most_bytes: the longest text.

    Raises:
        OSError: it cannot be read, or is too large.
        UnicodeDecodeError: it is not UTF-8.
    """
    if path == STDIN:
        data = sys.stdin.buffer.read(most_bytes + 1)
    else:
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes")
    return data.decode("utf-8")
