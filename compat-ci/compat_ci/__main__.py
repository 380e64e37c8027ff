# SPDX-License-Identifier: Apache-2.0
"""`python -m compat_ci run | newest | summary | report | due`; what the nox sessions call."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from compat_ci import matrix, report, results
from compat_ci.levels import run_release, static
from compat_ci.matrix import ROOT, Engine, Level
from compat_ci.results import Outcomes, Table
from compat_ci.wheels import fetch_newest

REPORT = ROOT / "compat-ci" / "report.json"
PAGE = ROOT / "docs" / "pages" / "reference" / "compatibility.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    engines = matrix.load()
    try:
        match options.command:
            case "run":
                return _run(engines[options.engine], options)
            case "newest":
                return max(_newest(engine, options) for engine in engines.values())
            case "summary":
                print(report.summary(_collect(options.results)), end="")
                return 0
            case "due":
                due = report.due(engines, results.read(REPORT))
                print(*(f"{name}-{version}" for name, version in due), sep="\n")
                return 1 if options.none and due else 0
        return _report(engines, options)
    except subprocess.CalledProcessError as error:
        print(f"cannot get the wheel: {error}")
        return 1


def _run(engine: Engine, options: argparse.Namespace) -> int:
    """Test one release of versions.toml."""
    release = engine.release(options.version)
    top = min(release.level, options.level or release.level)
    return _keep(
        engine, release.version, run_release(engine, release, top, options.cache), options.results
    )


def _newest(engine: Engine, options: argparse.Namespace) -> int:
    """Test what users will run next, whether or not versions.toml knows it: the static level."""
    status = 0
    for index in (None, engine.nightly) if options.nightly and engine.nightly else (None,):
        tree = fetch_newest(engine.package, options.cache, index)
        outcomes = {Level.STATIC: static(engine, tree)}
        status |= _keep(engine, tree.version, outcomes, options.results)
    return status


def _keep(engine: Engine, version: str, outcomes: Outcomes, folder: Path) -> int:
    """Write the outcomes to a file and print them."""
    for level, outcome in outcomes.items():
        verdict = "passed" if outcome.passed else "FAILED"
        print(f"{engine.name} {version}, {level}: {verdict} ({outcome.checked})")
        for reason in outcome.reasons:
            print(f"  {reason}")
    results.write(folder / f"{engine.name}-{version}.json", {engine.name: {version: outcomes}})
    return 0 if all(outcome.passed for outcome in outcomes.values()) else 1


def _collect(folder: Path) -> Table:
    """The results of all runs in `folder`."""
    table: Table = {}
    for path in sorted(folder.glob("*.json")):
        table = results.merge(table, results.read(path))
    return table


def _report(engines: dict[str, Engine], options: argparse.Namespace) -> int:
    """Write the report and the page of the docs, or check that the page agrees with the report.

    The report keeps releases of versions.toml only.
    """
    table = results.read(REPORT)
    if options.write:
        table = results.merge(table, _collect(options.results))
        table = {
            name: {
                release.version: table[name][release.version]
                for release in engine.releases
                if release.version in table.get(name, {})
            }
            for name, engine in engines.items()
            if name in table
        }
        results.write(REPORT, table)
        PAGE.write_text(report.page(engines, table), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == report.page(engines, table):
        return 0
    print(f"{PAGE.name} is out of date; `nox -s compat-report -- --write` rewrites it")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compat_ci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="test one release of versions.toml")
    run.add_argument("version")
    run.add_argument("--level", type=Level.parse, help="the highest level; default: the release's")
    newest = commands.add_parser("newest", help="check the newest releases statically")
    newest.add_argument("--nightly", action="store_true", help="check the nightly builds, too")
    run.add_argument("--engine", default="vllm", choices=list(matrix.load()))
    for command in (run, newest):
        command.add_argument("--cache", type=_folder, required=True, help="keeps unpacked wheels")
    summary = commands.add_parser("summary", help="print the results as a Markdown table")
    page = commands.add_parser("report", help="write or check the report and its page")
    action = page.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the report and the page")
    action.add_argument("--check", action="store_true", help="fail if the page is out of date")
    due = commands.add_parser("due", help="print the releases whose results are not of this code")
    due.add_argument("--none", action="store_true", help="fail if there are any")
    for command in (run, newest, summary, page):
        command.add_argument("--results", type=_folder, required=True, help="one file for each run")
    return parser


def _folder(name: str) -> Path:
    """An absolute path: the process that reads the files has another working directory."""
    return Path(name).resolve()


if __name__ == "__main__":
    sys.exit(main())
