# SPDX-License-Identifier: Apache-2.0
"""Which control groups limit this process: its own and all above it, of both versions of cgroups.

A limit may be set at any level. systemd sets one on a service or its slice, Slurm on a job or a
step, Kubernetes on a pod; inside a container often only the lowest levels can be seen.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Level(NamedTuple):
    """One control group.

    Attributes:
        folder: with its files.
        version: of the interface, 1 or 2; files have other names in each.
    """

    folder: Path
    version: int


def levels(controller: str, root: Path = Path("/")) -> list[Level]:
    """The control groups that limit what `controller` counts, the process's own first.

    Args:
        controller: as "memory" or "hugetlb".
        root: where the file system begins.

    Returns:
        All levels that can be seen. Some of the folders may not exist, and some may have no files
        of this controller.
    """
    try:
        paths = _paths(controller, (root / "proc/self/cgroup").read_text())
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, (kind, *_, options) = before.split(), after.split()
        version = {"cgroup": 1, "cgroup2": 2}.get(kind, 0)
        if version == 2 or (version == 1 and controller in options.split(",")):
            mounted, point = _unescape(fields[3]), root / _unescape(fields[4]).lstrip("/")
            found += [Level(f, version) for f in _chain(point, mounted, paths.get(version))]
    return found


def _paths(controller: str, text: str) -> dict[int, str]:
    """The process's place in the hierarchies of each version (cgroups(7), /proc/pid/cgroup)."""
    paths = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", maxsplit=2)
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    return paths


def _chain(point: Path, mounted: str, path: str | None) -> list[Path]:
    """Folders from that of `path` up to `point`, where `mounted` of the hierarchy is.

    A container may see the host's path of its group, but have only the group itself mounted, and a
    process may be outside of the namespace that it sees: then only `point` is known to count.
    """
    if path is None:
        return []
    try:
        below = PurePosixPath(path).relative_to(mounted)
    except ValueError:
        return [point]
    if ".." in below.parts:
        return [point]
    own = point / below
    return [own, *(folder for folder in own.parents if folder.is_relative_to(point))]


def _unescape(field: str) -> str:
    r"""A field of mountinfo, where blanks and the like are written as \040."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), field)
