# SPDX-License-Identifier: Apache-2.0
"""`python -m mutants [AREA ...]`: what `nox -s mutants` calls."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence

from integration.interrupts import interrupt_at_sigterm
from mutants import changed, entries, jobs, verdicts
from mutants.verdicts import Result, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mutants and prints what became of them; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.changed is not None:
        return _try_changed(options)
    try:
        mutants = entries.load()
        chosen = entries.choose(mutants, options.area, options.only)
    except ValueError as error:
        print(error)
        return 2
    if options.list:
        for mutant in chosen:
            print(f"{mutant.area}: {mutant.name} ({mutant.file})")
        return 0
    if faults := entries.faults(chosen):
        print("\n".join(faults))
        return 2
    results = jobs.run(chosen, options.jobs, lambda result: print(result, flush=True))
    _print(results)
    return 0 if verdicts.passes(results) else 1


def _try_changed(options: argparse.Namespace) -> int:
    """Runs mutants made of the changed lines and prints the survivors, which are no failure: many
    change nothing that a test could see."""
    try:
        mutants = changed.make(options.changed or None)
    except subprocess.CalledProcessError as error:
        print(f"--changed {options.changed}: {error.stderr.strip()}; allowed: a commit of git")
        return 2
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line} {' '.join(mutant.tests)}")
        return 0
    results = jobs.run(mutants, options.jobs, lambda result: print(result, flush=True))
    print(f"\n{changed.report(results)}\n")
    killed = sum(result.verdict is Verdict.KILLED for result in results)
    print(f"{killed} of {len(results)} mutants of changed lines are killed")
    return 1 if any(result.verdict is Verdict.ERROR for result in results) else 0


def _print(results: Sequence[Result]) -> None:
    print(f"\n{verdicts.table(results)}")
    for verdict in (Verdict.ERROR, Verdict.SURVIVED):
        for result in results:
            if result.verdict is verdict:
                print(f"{result.mutant.file}: {result}")
    killed = sum(result.verdict is Verdict.KILLED for result in results)
    print(f"{killed} of {len(results)} mutants are killed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__)
    parser.add_argument("area", nargs="*", help="lists to run, without .toml (default: all)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="mutants to run; may have *"
    )
    parser.add_argument(
        "--changed",
        nargs="?",
        const="",
        metavar="BASE",
        help="make mutants of the lines changed since BASE (default: the branch's beginning)",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="runs at a time (default: cores)")
    return parser


if __name__ == "__main__":
    interrupt_at_sigterm()
    raise SystemExit(main())
