# SPDX-License-Identifier: Apache-2.0
"""Runs sections, each in a process of its own, and ends one that takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from integration.gpu.journal import Journal
from integration.gpu.section import SECONDS

ROOT = Path(__file__).resolve().parents[2]
FAILURE_LINES = 40
ENDED = "exit status 0"

RESERVE_SECONDS = 3.0
"""Of a run with a limit, to write the report in."""

SHORTEST_SECONDS = 15.0
"""A section that has less time is not begun: to import torch and to register an arena takes some
seconds."""


@dataclass(frozen=True, slots=True)
class Run:
    """What is the same for all sections.

    Attributes:
        rows: the file of rows.
        quick: whether to measure less.
        deadline: by `time.monotonic`, when the whole command must end; None: never.
    """

    rows: Path
    quick: bool
    deadline: float | None = None


def run_sections(run: Run, names: Sequence[str]) -> Iterator[bool]:
    """Run them one after the other. Gives, after each, whether the time is up with some left."""
    begun = time.monotonic()
    for number, name in enumerate(names):
        left = _seconds_left(run)
        if left is not None and left < SHORTEST_SECONDS:
            print(f"  no time for {', '.join(names[number:])}: --resume goes on", flush=True)
            yield True
            return
        print(f"[{time.monotonic() - begun:5.0f} s] {name}", flush=True)
        ended = run_section(run, name)
        yield not ended
        if not ended:
            return


def run_section(run: Run, name: str) -> bool:
    """Run a section, whose output is shown as it comes. False if the time of all was up first: then
    it has not ended, and can go on."""
    left = _seconds_left(run)
    limit = SECONDS[name] if left is None else min(SECONDS[name], left)
    with closing(Journal(run.rows)) as file:
        file.begin(name, run.quick)
        section = [sys.executable, "-m", "integration.gpu.section"]
        command = [*section, name, str(run.rows), "--watch"]
        lines, status = run_command([*command, "--quick"] if run.quick else command, limit)
        if status is None and limit < SECONDS[name]:
            print(f"  {name} was stopped, the time is up: --resume goes on", flush=True)
            return False
        tail = "\n".join(lines[-FAILURE_LINES:])
        said = f"did not end within {limit:g} s" if status is None else status
        file.end(name, None if said == ENDED else f"{said}:\n{tail}")
    return True


def run_command(command: Sequence[str], seconds: float) -> tuple[list[str], str | None]:
    """Its lines, and its exit status; None if it was ended after `seconds`. No process that it has
    started in its own process group lives on. Its standard input ends with this process."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(process.pid)

    def clear() -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _kill(process.pid)  # others may hold the pipe

    timer = threading.Timer(seconds, end)
    timer.start()
    cleared = threading.Thread(target=clear, name="clears a process group")
    cleared.start()
    lines = []
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    cleared.join()
    timer.cancel()
    status = process.wait()
    assert process.stdin is not None
    process.stdin.close()
    return lines, None if late.is_set() else f"exit status {status}"


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _seconds_left(run: Run) -> float | None:
    if run.deadline is None:
        return None
    return run.deadline - time.monotonic() - RESERVE_SECONDS
