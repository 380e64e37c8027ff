# SPDX-License-Identifier: Apache-2.0
"""``python -m integration.gpu``: tests and measures on a CUDA device, and writes a report.

The exit status is 0 if every goal is reached, 1 if one is missed or a section failed, 2 if the
arguments are wrong or there is no CUDA device, 3 if the time was up first: then the same command
with ``--resume`` goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from integration.gpu import journal
from integration.gpu.journal import Journal, JournalError, Record
from integration.gpu.machine import describe_machine, slug
from integration.gpu.report import write_report
from integration.gpu.running import Run, run_sections
from integration.gpu.section import SECTIONS
from integration.interrupts import interrupt_at_sigterm

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "docs" / "pages" / "design" / "measured"
PARTIAL = ROOT / "gpu-partial.md"
MORE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections that are asked for; return the exit status."""
    options = _parse(arguments)
    try:
        if options.merge:
            record = journal.read(options.merge, SECTIONS)
            return _report(_out(options, record.machine["device"], record), record, missing=False)
        return _measure(options, arguments)
    except JournalError as error:
        return _error(str(error))


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


def _measure(options: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    begun = time.monotonic()
    missing = no_device()
    if missing is not None:
        return _error(f"no CUDA device to measure: {missing}")
    machine = describe_machine(["python", "-m", "integration.gpu", *(arguments or sys.argv[1:])])
    out = _out(options, machine["device"], None)
    path = out.with_suffix(".jsonl")
    sources = [path] if options.resume == [] and path.exists() else options.resume or []
    earlier = journal.read(sources, SECTIONS)
    _require_alike(options, machine, earlier)
    if path not in sources and path.exists():
        path.replace(path.with_suffix(".jsonl.old"))
    run = Run(path, options.quick, begun + options.seconds if options.seconds else None)
    with closing(Journal(path)) as file:
        for source in sources:
            if source != path:
                file.copy_from(source)
        file.machine(machine)
    print(f"{machine['device']}, driver {machine.get('driver', 'unknown')}", flush=True)
    wanted = [name for name in options.only or SECTIONS if _is_left(options, earlier, name)]
    left = False
    for missing_ones in run_sections(run, wanted):
        left = missing_ones
        # After each one: if this is ended from outside, the rest is not lost.
        status = _report(out, journal.read([path], SECTIONS), left)
    if not wanted:
        status = _report(out, journal.read([path], SECTIONS), left)
    return MORE if left else status


def _is_left(options: argparse.Namespace, earlier: Record, name: str) -> bool:
    """Whether a section is still to be run: one that failed is run again if it is named."""
    known = earlier.sections.get(name)
    if known is None or not known.ended:
        return True
    return options.only is not None and known.outcome.failure is not None


def _require_alike(options: argparse.Namespace, machine: dict[str, str], earlier: Record) -> None:
    """Raises JournalError if earlier rows do not belong to this run."""
    device = earlier.machine.get("device", machine["device"])
    if device != machine["device"]:
        raise JournalError(
            f"--resume: the rows are of {device!r}, this is {machine['device']!r}; "
            "allowed: rows of the same device"
        )
    if any(progress.quick != options.quick for progress in earlier.sections.values()):
        raise JournalError(
            f"--resume: the rows are of a run {'without' if options.quick else 'with'} --quick; "
            "allowed: to resume it the same way"
        )


def _report(out: Path, record: Record, missing: bool) -> int:
    """Write the report; returns the exit status for what is in it."""
    found = [record.sections[name] for name in SECTIONS if name in record.sections]
    partial = missing or len(found) < len(SECTIONS)
    partial |= any(progress.quick or not progress.ended for progress in found)
    outcomes = [progress.outcome for progress in found]
    write_report(out, record.machine, outcomes, partial)
    for outcome in outcomes:
        if outcome.failure is not None:
            print(f"{outcome.name} failed:\n{outcome.failure}")
    print(f"see {out}", flush=True)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _out(options: argparse.Namespace, device: str, record: Record | None) -> Path:
    """Where the report goes."""
    if options.out is not None:
        return Path(options.out)
    if record is None:
        partial = options.quick or options.only is not None
    else:
        partial = any(progress.quick for progress in record.sections.values())
        partial |= record.sections.keys() != SECTIONS.keys()
    return PARTIAL if partial else REPORTS / f"{slug(device)}.md"


def _error(message: str) -> int:
    print(f"integration.gpu: error: {message}", file=sys.stderr)
    return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m integration.gpu", description="test and measure FlexKV on a CUDA device"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the report, a .md file; the same name with .json and with .jsonl (the rows, as they "
        f"come) go beside it. Default: a file named after the device in "
        f"{REPORTS.relative_to(ROOT)}, of a partial run {PARTIAL.name}",
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), help="sections to run; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="less memory and fewer repeats")
    parser.add_argument(
        "--seconds",
        type=float,
        help="end after so long, with what was measured so far; --resume goes on",
    )
    parser.add_argument(
        "--resume",
        nargs="*",
        type=Path,
        metavar="ROWS",
        help="go on after earlier commands: their .jsonl files; default: the one beside --out",
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="ROWS",
        help="measure nothing: write the report of these .jsonl files",
    )
    options = parser.parse_args(arguments)
    if options.out is not None and options.out.suffix != ".md":
        parser.error(f"--out is {str(options.out)!r}; allowed: a path that ends with .md")
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds is {options.seconds:g}; allowed: more than 0")
    if options.only is not None:
        options.only = list(dict.fromkeys(options.only))
    return options


if __name__ == "__main__":
    interrupt_at_sigterm()
    sys.exit(main())
