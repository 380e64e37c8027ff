# SPDX-License-Identifier: Apache-2.0
"""How much host memory there is to take."""

from __future__ import annotations

import pathlib

_MEMINFO = pathlib.Path("/proc/meminfo")
_CGROUP = pathlib.Path("/sys/fs/cgroup")
_POOL = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def available_memory() -> int:
    """Bytes that this process may still take: of the machine's and of its container's memory.

    `MemAvailable` counts what the kernel can give without swapping (proc(5)); a container's
    limit counts what its processes use apart from page cache that can be dropped.
    """
    return max(0, min(_machine_available(), _cgroup_available()))


def free_huge_pages() -> int:
    """Bytes in the kernel's pool of 2 MiB pages that nobody has or has reserved; 0 without a pool.

    A container's limits count (hugetlb.2MB.max and the like); Kubernetes sets them to nothing for
    a pod that does not ask for huge pages.
    """
    try:
        free, reserved = (
            int((_POOL / name).read_text()) for name in ("free_hugepages", "resv_hugepages")
        )
    except (OSError, ValueError):
        return 0
    limits = (
        _limit_left(_CGROUP / "hugetlb.2MB.max", "hugetlb.2MB.current"),
        _limit_left(_CGROUP / "hugetlb.2MB.rsvd.max", "hugetlb.2MB.rsvd.current"),
        _limit_left(
            _CGROUP / "hugetlb" / "hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes"
        ),
    )
    return max(0, min((free - reserved) * (2 << 20), *limits))


def _limit_left(limit: pathlib.Path, usage: str) -> int:
    try:
        text = limit.read_text().strip()
        return _UNLIMITED if text == "max" else int(text) - int((limit.parent / usage).read_text())
    except (OSError, ValueError):
        return _UNLIMITED


def _machine_available() -> int:
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{_MEMINFO} has no MemAvailable line")


def _cgroup_available() -> int:
    for limit, usage, inactive, root in (
        ("memory.max", "memory.current", "inactive_file", _CGROUP),
        (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
            _CGROUP / "memory",
        ),
    ):
        try:
            text = (root / limit).read_text().strip()
            if text == "max" or int(text) >= _UNLIMITED:
                return _UNLIMITED
            used = int((root / usage).read_text())
            return int(text) - used + _stat(root / "memory.stat", inactive)
        except (OSError, ValueError):
            continue
    return _UNLIMITED


def _stat(path: pathlib.Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
