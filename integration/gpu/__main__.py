# SPDX-License-Identifier: Apache-2.0
"""``python -m integration.gpu``: tests and measures on a CUDA device, and writes a report.

The exit status is 1 if a goal is missed or a section failed, 2 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from integration.gpu.machine import describe_machine, slug
from integration.gpu.report import write_report
from integration.gpu.results import Outcome, read
from integration.gpu.section import SECONDS, SECTIONS

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "docs" / "pages" / "measured"
PARTIAL = ROOT / "gpu-partial.md"
FAILURE_LINES = 40
ENDED = "exit status 0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections that are asked for; return the exit status."""
    options = _parse(arguments)
    missing = no_device()
    if missing is not None:
        print(f"integration.gpu: error: no CUDA device to measure: {missing}", file=sys.stderr)
        return 2
    machine = describe_machine(["python", "-m", "integration.gpu", *(arguments or sys.argv[1:])])
    partial = options.quick or len(options.only) < len(SECTIONS)
    out = options.out or (PARTIAL if partial else REPORTS / f"{slug(machine['device'])}.md")
    print(f"{machine['device']}, driver {machine.get('driver', 'unknown')}", flush=True)
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for name in options.only:
        print(f"[{time.monotonic() - began:5.0f} s] {name}", flush=True)
        outcomes.append(run_section(name, options.quick))
        # After each one: if this is ended from outside, the rest is not lost.
        write_report(out, machine, outcomes, partial or len(outcomes) < len(options.only))
    for outcome in outcomes:
        if outcome.failure is not None:
            print(f"{outcome.name} failed:\n{outcome.failure}")
    print(f"[{time.monotonic() - began:5.0f} s] see {out}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def no_device() -> str | None:
    """Why nothing can be measured here, in one sentence; None if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}); allowed: a build of torch with CUDA"
    try:
        from flexkv_kernels import cuda_unavailable
    except ImportError as error:
        return f"flexkv-kernels cannot be imported ({error}); allowed: one built by nvcc"
    reason = cuda_unavailable()
    if reason is None and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds none; allowed: a build of torch with CUDA"
    return reason


def run_section(name: str, quick: bool) -> Outcome:
    """Run a section in a process of its own, whose output is shown as it comes."""
    with tempfile.TemporaryDirectory(prefix="flexkv-gpu-") as folder:
        path = Path(folder, "outcome.json")
        command = [sys.executable, "-m", "integration.gpu.section", name, str(path)]
        lines, status = _run([*command, "--quick"] if quick else command, SECONDS[name])
        try:
            outcome = read(path)
        except (OSError, ValueError):
            outcome = Outcome(SECTIONS[name])
        if status != ENDED:
            tail = "\n".join(lines[-FAILURE_LINES:])
            outcome.failure = f"{status}:\n{tail}"
        return outcome


def _run(command: list[str], seconds: float) -> tuple[list[str], str]:
    """Its lines, and how it ended. Ended after `seconds`, with all processes it has started."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    lines = []
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    status = process.wait()
    timer.cancel()
    return lines, f"did not end within {seconds:g} s" if late.is_set() else f"exit status {status}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m integration.gpu", description="test and measure FlexKV on a CUDA device"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the report, a .md file; the same name with .json goes beside it. Default: a file "
        f"named after the device in {REPORTS.relative_to(ROOT)}, of a partial run {PARTIAL.name}",
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run"
    )
    parser.add_argument(
        "--quick", action="store_true", help="less memory, fewer repeats, no compute-sanitizer"
    )
    options = parser.parse_args(arguments)
    if options.out is not None and options.out.suffix != ".md":
        parser.error(f"--out is {str(options.out)!r}; allowed: a path that ends with .md")
    options.only = list(dict.fromkeys(options.only))
    return options


if __name__ == "__main__":
    sys.exit(main())
