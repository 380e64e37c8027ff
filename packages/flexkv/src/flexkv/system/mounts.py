# SPDX-License-Identifier: Apache-2.0
"""Reads the kernel's list of mounts and other lists in /proc.

Any user with FUSE can mount something, under any name. The kernel writes names as they are, except
for blanks, tabs, line feeds and backslashes. So a name may be no UTF-8, and may hold characters
that Python, but not the kernel, takes for the end of a line.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mount of this process's namespace; see proc(5), mountinfo. The path `root` of its file
    system is mounted at `point`."""

    number: str
    device: str
    root: str
    point: str
    kind: str
    options: str


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    """The mounts, in the kernel's order: of two at one place, the later hides the earlier. Tests
    give another root of the file system. Raises OSError."""
    found = []
    for line in read_lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        number, _, device, mounted, point, *_ = before.split(" ")
        kind, *_, options = after.split(" ")
        found.append(Mount(number, device, _unescape(mounted), _unescape(point), kind, options))
    return found


def read_lines(path: Path) -> list[str]:
    """The lines of a file of the kernel, without their ends. Bytes that are no text stay in paths
    as Python's own functions give and take them (`os.fsdecode`). Raises OSError."""
    return [line for line in os.fsdecode(path.read_bytes()).split("\n") if line]


def _unescape(field: str) -> str:
    r"""Decode a path, in which the kernel writes a blank as \040, for example."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), field)
