# SPDX-License-Identifier: Apache-2.0
"""Creates directories that no other user can write to, whatever the umask is."""

from __future__ import annotations

import contextlib
import os


def make_directories(path: str, mode_above: int = 0o700) -> None:
    """Create a directory with mode 0700, and the missing ones above it. Any of them may exist, or
    be created by another process at the same moment.

    Args:
        path: path of the directory.
        mode_above: mode of the directories above, from which the umask may take bits. It gives no
            other user the right to write.

    Raises:
        OSError: a directory cannot be created, for example below a symbolic link to nothing.
    """
    missing = []
    above = path.rstrip("/") or "/"
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above) or "."
    for number, each in reversed(list(enumerate(missing))):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, mode_above if number else 0o700)
