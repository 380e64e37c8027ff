# SPDX-License-Identifier: Apache-2.0
"""How much host memory there is to take."""

from __future__ import annotations

import pathlib

_MEMINFO = pathlib.Path("/proc/meminfo")
_CGROUP = pathlib.Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def available_memory() -> int:
    """Bytes that this process may still take: of the machine's and of its container's memory.

    `MemAvailable` counts what the kernel can give without swapping (proc(5)); a container's
    limit counts what its processes use apart from page cache that can be dropped.
    """
    return max(0, min(_machine_available(), _cgroup_available()))


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
