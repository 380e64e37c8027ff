# SPDX-License-Identifier: Apache-2.0
"""How much of the cores other processes take while the demo measures."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)
"""Places of idle time and of waits for I/O in a line of /proc/stat."""
_GUESTS = 8
"""Place from which a line of /proc/stat repeats time that it has counted before."""
_PARENT, _TIMES = 1, slice(11, 15)
"""Places of a process in /proc/PID/stat, behind its name: of its parent, and of its CPU times with
those of the children that it has reaped."""


@dataclass(frozen=True, slots=True)
class Look:
    """CPU seconds so far.

    Attributes:
        at: time.monotonic().
        busy: of the cores that this process may use, time stolen by a hypervisor included.
        own: of a process and its descendants.
    """

    at: float
    busy: float
    own: float


def look(pid: int | None = None) -> Look:
    """Read the CPU seconds. `pid` is the process whose own they are; None for this one."""
    return Look(time.monotonic(), _busy(), _own(os.getpid() if pid is None else pid))


def others_share(before: Look, after: Look) -> float:
    """The share of the cores that other processes took between two looks, from 0 to 1."""
    taken = (after.busy - before.busy) - (after.own - before.own)
    could = (after.at - before.at) * len(os.sched_getaffinity(0))
    return min(1.0, max(0.0, taken / could)) if could > 0 else 0.0


def _busy() -> float:
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in (PROC / "stat").read_text(encoding="ascii").splitlines():
        name, *values = line.split()
        if name in names:
            used = (int(each) for place, each in enumerate(values[:_GUESTS]) if place not in _IDLE)
            ticks += sum(used)
    return ticks / _TICKS


def _own(pid: int) -> float:
    fields = {number: found for number, found in map(_process, _numbers()) if found}
    members, found = {pid}, {pid}
    while found:
        found = {each for each, of in fields.items() if int(of[_PARENT]) in found} - members
        members |= found
    return (
        sum(int(each) for one in members & fields.keys() for each in fields[one][_TIMES]) / _TICKS
    )


def _numbers() -> list[int]:
    return [int(each.name) for each in PROC.iterdir() if each.name.isdigit()]


def _process(pid: int) -> tuple[int, list[str]]:
    """A process with its fields behind its name, which are none if it has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return pid, []
    return pid, text.rpartition(")")[2].split()
