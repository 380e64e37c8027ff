# SPDX-License-Identifier: Apache-2.0
"""`python -m integration.lanes`: what a landing would run, its limit, and the record of times."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from integration.lanes.landing import Lane, files_of_tests
from integration.lanes.record import LAST_RUN, RECORD, Record, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m integration.lanes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("landing", help="name the files of tests that the change concerns")
    commands.add_parser("limit", help="print the minutes after which .ci/run hangs by the record")
    times = commands.add_parser("times", help="print the times of the last run")
    times.add_argument("--write", action="store_true", help="take them into the record")
    options = parser.parse_args(arguments)
    if options.command == "times":
        return _times(write=options.write)
    lane, record = Lane.of_landing(), Record.committed()
    expected, limit = lane.minutes(record)
    if options.command == "limit":
        print(round(limit))
        return 0
    print(f"all tests run: {lane.whole}" if lane.whole else "\n".join(_chosen(lane)))
    print(
        f"about {expected:.0f} minutes on the machine of the record; .ci/run ends after {limit:.0f}"
    )
    return 0


def _chosen(lane: Lane) -> list[str]:
    return [file for file in files_of_tests() if file not in lane.files]


def _times(*, write: bool) -> int:
    try:
        run = Record.read(LAST_RUN)
    except OSError as error:
        print(f"no run to read: {error}; allowed: a file that `nox -s tests` has written")
        return 1
    record = Record.committed()
    print("\n".join(report(run, record)))
    if write:
        record.updated(run, {*files_of_tests()}).write(RECORD)
        print(f"written into {RECORD}; run whole: {run.whole or 'no, so the commit stays'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
