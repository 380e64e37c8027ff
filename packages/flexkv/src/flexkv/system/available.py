# SPDX-License-Identifier: Apache-2.0
"""Finds how much host memory this process may still take, and the control groups that limit it.

Those are its own and all above it, in cgroups v1 and v2. A limit may be set at any level. systemd
sets limits on a service or its slice, Slurm on a job or a step, Kubernetes on a pod. Inside a
container, often only the lowest levels are visible.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from flexkv.system.mounts import read_lines, read_mounts

_POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
_ROOT = Path("/")

_LIMITS = {
    ("memory", 1): (("memory.limit_in_bytes", "memory.usage_in_bytes"),),
    ("memory", 2): (("memory.max", "memory.current"), ("memory.high", "memory.current")),
    ("hugetlb", 1): (("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes"),),
    ("hugetlb", 2): (
        ("hugetlb.2MB.max", "hugetlb.2MB.current"),
        ("hugetlb.2MB.rsvd.max", "hugetlb.2MB.rsvd.current"),
    ),
}
"""By controller and version of cgroups: the files of limits, each with the file of what counts.
Above memory.high the kernel stalls a process and does not end it."""

_DROPPABLE = {1: "total_inactive_file", 2: "inactive_file"}
"""By version of cgroups: the entry of memory.stat that counts page cache that can be dropped."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Memory that another process is about to take: `size` bytes that it has not taken yet, which
    the limits of the control groups `groups` count; see `memory_groups`."""

    size: int
    groups: frozenset[str]


def available_memory(root: Path = _ROOT, promised: Sequence[Promise] = ()) -> int:
    """Bytes that this process may still take, within the machine's memory and the limits of its
    control groups.

    `MemAvailable` is the memory that the kernel can provide without swapping (proc(5)). A group's
    usage includes all processes below it; page cache that the kernel can drop is subtracted.

    `promised` is what other processes are about to take. Read it first: what they take meanwhile
    then counts twice and not never. Raises OSError if /proc/meminfo cannot be read or has no
    `MemAvailable`.
    """
    machine = _meminfo(root, "MemAvailable") - sum(each.size for each in promised)
    return max(0, min([machine, *_left_in_groups(root, promised)]))


def total_memory(root: Path = _ROOT) -> int:
    """Bytes that this process may have at most: the machine's memory, or the lowest limit of its
    control groups; or the kernel's pool of 2 MiB pages, which does not count in these. Raises
    OSError if /proc/meminfo cannot be read or has no `MemTotal`."""
    limits = (
        _number(folder / name)
        for folder, version in levels("memory", root)
        for name, _ in _LIMITS["memory", version]
    )
    pool = (_number(root / _POOL / "nr_hugepages") or 0) * (2 << 20)
    ordinary = [_meminfo(root, "MemTotal"), *(each for each in limits if each is not None)]
    return max(min(ordinary), pool)


def memory_groups(root: Path = _ROOT) -> frozenset[str]:
    """Names of the control groups that count this process's memory, the same in all containers."""
    return frozenset(map(_name_of, (level.folder for level in levels("memory", root))))


def free_huge_pages(root: Path = _ROOT) -> int:
    """Free and unreserved bytes in the kernel's pool of 2 MiB pages; 0 without a pool.

    Limits of control groups count too (hugetlb.2MB.max and the like). Kubernetes sets them to 0 for
    a pod that requests no huge pages.
    """
    free, reserved = (_number(root / _POOL / each) for each in ("free_hugepages", "resv_hugepages"))
    if free is None or reserved is None:
        return 0
    left = (left for _, left in _left("hugetlb", root))
    return max(0, min([(free - reserved) * (2 << 20), *left]))


def _left_in_groups(root: Path, promised: Sequence[Promise]) -> Iterator[int]:
    for (folder, version), left in _left("memory", root):
        name = _name_of(folder)
        others = sum(each.size for each in promised if name in each.groups)
        try:
            droppable = _entry(folder / "memory.stat", _DROPPABLE[version])
        except (OSError, ValueError):
            droppable = None
        yield left + (droppable or 0) - others


def _name_of(folder: Path) -> str:
    # A container may see its group under another path, but with the same number.
    try:
        return str(os.stat(folder).st_ino)
    except OSError:
        return ""


def _left(controller: str, root: Path) -> Iterator[tuple[Level, int]]:
    """For each limit the bytes left below it, less than 0 above it."""
    for level in levels(controller, root):
        for limit, usage in _LIMITS[controller, level.version]:
            most, used = _number(level.folder / limit), _number(level.folder / usage)
            if most is not None and used is not None:
                yield level, most - used


def _number(path: Path) -> int | None:
    """A number in a file; None if there is none, as of the word `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _meminfo(root: Path, wanted: str) -> int:
    kibibytes = _entry(root / "proc/meminfo", f"{wanted}:")
    if kibibytes is None:
        raise OSError(f"/proc/meminfo has no {wanted} line")
    return kibibytes * 1024


def _entry(path: Path, name: str) -> int | None:
    """The number behind a name in a file of the kernel with a name and a number in each line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(line[1]) for line in lines if line[:1] == [name]), None)


class Level(NamedTuple):
    """A control group: the directory with its files, whose names depend on the version of the
    interface, 1 or 2."""

    folder: Path
    version: int


def levels(controller: str, root: Path = _ROOT) -> list[Level]:
    """Find the control groups of this process for a controller, such as "memory" or "hugetlb": all
    visible levels, the process's own first. Some of the folders may not exist or may lack files of
    this controller. Tests give another root of the file system."""
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
    process may also be outside the namespace that it sees. In both cases only the mount point of
    the hierarchy, at which the path `mounted` within it is, is known to limit the process. `path`
    is None for a process without a group in this hierarchy.
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
