# SPDX-License-Identifier: Apache-2.0
"""Finds the control groups that limit this process: its own and all above it, in cgroups v1 and v2.

A limit may be set at any level. systemd sets limits on a service or its slice, Slurm on a job or a
step, Kubernetes on a pod. Inside a container, often only the lowest levels are visible.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from flexkv.system.mounts import read_lines, read_mounts


class Level(NamedTuple):
    """One control group.

    Attributes:
        folder: directory with the group's files.
        version: version of the interface, 1 or 2. The names of the files depend on it.
    """

    folder: Path
    version: int


def levels(controller: str, root: Path = Path("/")) -> list[Level]:
    """Find the control groups of this process for one controller.

    Args:
        controller: name of the controller, such as "memory" or "hugetlb".
        root: root of the file system; another one in tests.

    Returns:
        All visible levels, the process's own first. Some of the folders may not exist or may lack
        files of this controller.
    """
    try:
        paths = _paths(controller, read_lines(root / "proc/self/cgroup"))
        mounts = read_mounts(root)
    except OSError:
        return []
    found = []
    for mount in mounts:
        version = {"cgroup": 1, "cgroup2": 2}.get(mount.kind, 0)
        if version == 2 or (version == 1 and controller in mount.options.split(",")):
            point = root / mount.point.lstrip("/")
            found += [Level(f, version) for f in _chain(point, mount.root, paths.get(version))]
    return found


def _paths(controller: str, lines: Iterable[str]) -> dict[int, str]:
    """The path of this process's group, by version (cgroups(7), /proc/pid/cgroup)."""
    paths = {}
    for line in lines:
        number, controllers, path = line.split(":", maxsplit=2)
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    return paths


def _chain(point: Path, mounted: str, path: str | None) -> list[Path]:
    """The folders from the group's own up to the mount point.

    A container may see the host's path of its group while only the group itself is mounted. A
    process may also be outside the namespace that it sees. In both cases only `point` is known to
    limit the process.

    Args:
        point: mount point of the hierarchy.
        mounted: path within the hierarchy that is mounted there.
        path: path of the process's group; None if it has none in this hierarchy.
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
