# SPDX-License-Identifier: Apache-2.0
"""fio, the limit that the disk tier is judged against: one file, overwritten and read in order."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

from integration.bench.disk_contenders import Direction, Transfer

JOBS = 8
"""Requests at once: as many as the disk tier has threads for a directory."""

_HUGE_PAGES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1073741824"
)
"""For GLIBC_TUNABLES: fio's buffers lie in huge pages, as those of the others do."""

ASYNCHRONOUS = "fio libaio"
THREADS = "fio psync"
HOW_TO_INSTALL = "fio is not on PATH; install it (Debian, Ubuntu: apt install fio)"


def installed() -> bool:
    """Whether fio can be run."""
    return shutil.which("fio") is not None


class Fio:
    """fio in one of its two ways to have `JOBS` requests under way: `ASYNCHRONOUS`, one thread
    that has them all, or `THREADS`, a thread for each, on a part of the file of its own."""

    how = "O_DIRECT, one file written over"

    def __init__(self, name: str, path: Path, size: int, block_bytes: int) -> None:
        self.name = name
        self._command = [
            "fio",
            "--name=bench",
            f"--filename={path}",
            f"--bs={block_bytes}",
            "--direct=1",
            "--overwrite=1",
            "--allow_file_create=1",
            "--output-format=json",
            *_concurrency(name, size),
        ]
        # The first write allocates; every later one overwrites.
        self.write()

    def write(self) -> Transfer:
        return self._run("write")

    def read(self) -> Transfer:
        return self._run("read")

    def close(self) -> None:
        """Nothing: nothing runs between two transfers."""

    def _run(self, direction: Direction) -> Transfer:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*self._command, f"--rw={direction}"],
            env=os.environ | {"GLIBC_TUNABLES": _HUGE_PAGES},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"fio failed: {done.stderr or done.stdout}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        (job,) = report["jobs"]
        part = job[direction]
        return Transfer(
            size=part["io_bytes"],
            seconds=part["io_bytes"] / part["bw_bytes"],
            cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        )


def _concurrency(name: str, size: int) -> list[str]:
    if name == ASYNCHRONOUS:
        return ["--ioengine=libaio", f"--iodepth={JOBS}", f"--size={size}", "--loops=2"]
    # fio counts from when each thread began, and they begin one after the other: in a short run
    # the sum would be up to twice what the disk can do.
    part = size // JOBS
    return [
        "--ioengine=psync",
        f"--numjobs={JOBS}",
        "--thread",
        "--group_reporting",
        "--loops=4",
        f"--size={part}",
        f"--offset_increment={part}",
    ]
