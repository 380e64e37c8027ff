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

_MEMINFO = "proc/meminfo"
_POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
_ROOT = Path("/")

_LIMITS = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
"""By version of cgroups: the files of limits, the file of the usage, and the entry of memory.stat
that counts droppable page cache. Above memory.high the kernel stalls a process and does not end
it."""

_POOL_LIMITS = {
    1: (("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes"),),
    2: (
        ("hugetlb.2MB.max", "hugetlb.2MB.current"),
        ("hugetlb.2MB.rsvd.max", "hugetlb.2MB.rsvd.current"),
    ),
}


@dataclass(frozen=True, slots=True)
class Promise:
    """Memory that another process is about to take.

    Attributes:
        size: bytes that it has not taken yet.
        groups: the control groups whose limits count them; see `memory_groups`.
    """

    size: int
    groups: frozenset[str]


def available_memory(root: Path = _ROOT, promised: Sequence[Promise] = ()) -> int:
    """Bytes that this process may still take, within the machine's memory and the limits of its
    control groups.

    `MemAvailable` is the memory that the kernel can provide without swapping (proc(5)). A group's
    usage includes all processes below it; page cache that the kernel can drop is subtracted.

    Args:
        promised: memory that other processes are about to take. Read it first: what they take
            meanwhile then counts twice and not never.

    Raises:
        OSError: /proc/meminfo cannot be read or has no `MemAvailable`.
    """
    machine = _meminfo(root, "MemAvailable") - sum(each.size for each in promised)
    return max(0, min([machine, *_left_in_groups(root, promised)]))


def total_memory(root: Path = _ROOT) -> int:
    """Bytes that this process may have at most: the machine's memory, or the lowest limit of its
    control groups; or the kernel's pool of 2 MiB pages, which does not count in these.

    Raises:
        OSError: /proc/meminfo cannot be read or has no `MemTotal`.
    """
    limits = (
        _limit(folder / name)
        for folder, version in levels("memory", root)
        for name in _LIMITS[version][0]
    )
    pool = (_limit(root / _POOL / "nr_hugepages") or 0) * (2 << 20)
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
    try:
        free, reserved = (
            int((root / _POOL / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return 0
    return max(0, min([(free - reserved) * (2 << 20), *_left_in_pools(root)]))


def _left_in_groups(root: Path, promised: Sequence[Promise]) -> Iterator[int]:
    for folder, version in levels("memory", root):
        limits, usage, droppable = _LIMITS[version]
        for limit in limits:
            left = _left(folder, limit, usage)
            if left is not None:
                name = _name_of(folder)
                others = sum(each.size for each in promised if name in each.groups)
                yield left + _stat(folder / "memory.stat", droppable) - others


def _name_of(folder: Path) -> str:
    # A container may see its group under another path, but with the same number.
    try:
        return str(os.stat(folder).st_ino)
    except OSError:
        return ""


def _left_in_pools(root: Path) -> Iterator[int]:
    for folder, version in levels("hugetlb", root):
        for limit, usage in _POOL_LIMITS[version]:
            left = _left(folder, limit, usage)
            if left is not None:
                yield left


def _left(folder: Path, limit: str, usage: str) -> int | None:
    """Bytes left below a limit, less than 0 above it; None without a limit."""
    most = _limit(folder / limit)
    try:
        return None if most is None else most - int((folder / usage).read_text())
    except (OSError, ValueError):
        return None


def _limit(path: Path) -> int | None:
    """A number in a file; None if there is none, as of the word `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _meminfo(root: Path, wanted: str) -> int:
    for line in (root / _MEMINFO).read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == wanted:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/{_MEMINFO} has no {wanted} line")


def _stat(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


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
