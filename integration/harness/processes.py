# SPDX-License-Identifier: Apache-2.0
"""Which processes an engine consists of, how much memory they hold, and how to end them.

Linux only, from /proc: an engine runs in a process group of its own, so its processes are those
whose group id is the pid of the driver, also after their parents have died.

Engines stay in the session of the tests. Linux divides busy cores between sessions
(`sched_autogroup`), and sessions that mostly wait can get nothing for many seconds: beside three
busy processes on two cores, Linux 6.18, one node's read from another took 9 s, and 24 ms within one
session.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
SHM = Path("/dev/shm")
_STATE, _GROUP, _THREADS = 0, 2, 17
"""Fields of `/proc/PID/stat` behind the process's name."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of several processes in bytes.

    ``rss`` counts a page once for each process that maps it, ``pss`` once in all.
    ``anonymous`` leaves out files and shared memory.
    """

    rss: int
    pss: int
    anonymous: int


def group_pids(group: int) -> list[int]:
    """Pids of the living processes of process group ``group``; zombies are not alive.

    A process whose first thread has ended is a zombie while its other threads live: they still
    hold its files and sockets, also for some milliseconds after SIGKILL.
    """
    found: list[int] = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name in brackets may hold blanks: read from behind it.
        fields = stat.rpartition(")")[2].split()
        ended = fields[_STATE] in ("Z", "X") and int(fields[_THREADS]) <= 1
        if int(fields[_GROUP]) == group and not ended:
            found.append(int(entry.name))
    return sorted(found)


def memory_of(pids: list[int]) -> Memory:
    """Memory of ``pids`` together; a process that ends meanwhile counts nothing."""
    rss = pss = anonymous = 0
    for pid in pids:
        try:
            rollup = (_PROC / str(pid) / "smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = {
            line.split(":")[0]: int(line.split()[1]) * 1024
            for line in rollup.splitlines()
            if line.endswith(" kB")
        }
        rss += fields.get("Rss", 0)
        pss += fields.get("Pss", 0)
        anonymous += fields.get("Anonymous", 0)
    return Memory(rss, pss, anonymous)


def command_of(pid: int) -> str:
    """Command line of a process, for messages; "" when it is gone."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def wait_until_gone(group: int, timeout: float) -> list[int]:
    """Wait up to ``timeout`` seconds for a process group to be empty; return who is still there."""
    deadline = time.monotonic() + timeout
    while True:
        left = group_pids(group)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.05)


def kill_group(group: int) -> list[int]:
    """SIGKILL every process of a process group, each by its pid; return the pids.

    All are stopped before the first is killed. Otherwise a process that notices the death of
    another could end in order, which no process does in a crash.
    """
    killed: set[int] = set()
    # A process may take a while to end, and is killed once more then.
    while stopped := _stop_group(group):
        killed.update(pid for pid in stopped if _signal(pid, signal.SIGKILL))
        time.sleep(0.05)
    return sorted(killed)


def _stop_group(group: int) -> list[int]:
    """SIGSTOP every process of a process group, also those that another starts meanwhile."""
    stopped: list[int] = []
    while running := [pid for pid in group_pids(group) if pid not in stopped]:
        for pid in running:
            _signal(pid, signal.SIGSTOP)
        stopped += running
    return stopped


def _signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def shm_files(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that any of ``pids`` maps or holds open.

    Asked of the processes and not of the folder, in which other programs have files, too. FlexKV
    keeps its runtime directory there open, which is meant to stay.
    """
    prefix = f"{SHM}/"
    found: set[str] = set()
    for pid in pids:
        try:
            maps = (_PROC / str(pid) / "maps").read_text()
            found.update(_link(entry) for entry in (_PROC / str(pid) / "fd").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            continue
        # Of six columns the last is the path, which may hold blanks.
        found.update(line.split(maxsplit=5)[5] for line in maps.splitlines() if prefix in line)
    files = {
        Path(name) for name in found if name.startswith(prefix) and not name.endswith(" (deleted)")
    }
    return {path for path in files if not path.is_dir()}


def memory_files(pid: int, name: str) -> list[Path]:
    """The memfd files called ``name`` that a process holds open, as paths that can be opened."""
    found = []
    for link in (_PROC / str(pid) / "fd").iterdir():
        if _link(link).startswith(f"/memfd:{name}"):
            found.append(link)
    return found


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""
