# SPDX-License-Identifier: Apache-2.0
"""Names processes for people, who may be in another PID namespace, as in another container."""

from __future__ import annotations

import os
from pathlib import Path


def pid_namespace() -> int:
    """The number of this process's PID namespace; 0 if the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def process_text(pid: object, namespace: object) -> str:
    """The id of a process as it knows itself in its `pid_namespace`."""
    if namespace == pid_namespace():
        return str(pid)
    return f"{pid} of another PID namespace, such as a container's"


def parent_of(pid: int) -> int | None:
    """The process that a process of this PID namespace is the child of; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])
