# SPDX-License-Identifier: Apache-2.0
"""Compares the places of several cache directories: none may be another one, or lie in it.

Each directory gets an equal part of `ssd_cache_gb`. Two paths of one directory would lock each
other out, or keep every block of two engines in one place.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flexkv.types.deadline import call_within
from flexkv.types.errors import DiskError

_COMPARE_SECONDS = 1.0
"""Time limit for the directories' answers. Directories that do not answer are not compared with the
others. Not tuned."""


class RealPath(NamedTuple):
    """The place of a directory.

    Attributes:
        path: its path without symbolic links.
        device: number of the file system that it is on, or will be on once it is created.
    """

    path: str
    device: int


def places_of(roots: Sequence[str]) -> dict[str, RealPath]:
    """The places of those directories that answer within a second."""
    # A mount that hangs lets realpath(3) hang, and a start goes on without it.
    return call_within({root: functools.partial(_place, root) for root in roots}, _COMPARE_SECONDS)


def check_apart(places: Mapping[str, RealPath]) -> None:
    """Refuse two directories that are one, or of which one lies in the other on the same file
    system.

    Raises:
        DiskError: see above.
    """
    for (root, upper), (other, lower) in itertools.permutations(places.items(), 2):
        same = upper.path == lower.path
        within = os.path.commonpath([upper.path, lower.path]) == upper.path
        if same or (within and upper.device == lower.device):
            how = "is the same directory as" if same else "lies in"
            raise DiskError(
                f"{other} from ssd_cache_dir {how} {root}; allowed: directories apart from each "
                f"other, each on a drive of its own"
            )


def _place(root: str) -> RealPath:
    path = os.path.realpath(root)
    there = path
    while True:
        try:
            return RealPath(path, os.stat(there).st_dev)
        except OSError:
            if there == "/":
                return RealPath(path, -1)
            there = os.path.dirname(there)
