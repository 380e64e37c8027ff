# SPDX-License-Identifier: Apache-2.0
"""Read every block of a cache directory and verify its checksum. The command changes nothing and
works beside running engines: a block that an engine replaces meanwhile is not bad. Exit code 0 if
all blocks are intact, 1 if not or if a folder cannot be read."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from flexkv.cli.common import Command, add_directories, add_json, find_folders, print_json
from flexkv.tiers.disk.files import OsFiles
from flexkv.tiers.disk.folder_check import BadBlock, Report, check_folder
from flexkv.types.deadline import call_beside
from flexkv.types.errors import DiskError
from flexkv.types.texts import blocks, size

_LINES = 10
"""The most bad blocks of a folder with the same reason that are printed line by line. More become
one line; JSON lists all of them."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directories(parser)
    add_json(parser)


def _run(args: argparse.Namespace) -> int:
    found = find_folders(args.directories)
    begun = time.monotonic()
    reports, unreadable = [], 0
    with _progress() as progress:
        for path in found.folders:
            try:
                reports.append(_verify(progress, path))
            except DiskError as error:
                print(error, file=sys.stderr)
                unreadable += 1
    seconds = time.monotonic() - begun
    bad = [block for report in reports for block in report.bad]
    if args.json:
        checked = [
            {name: value for name, value in asdict(report).items() if name != "bad"}
            for report in reports
        ]
        print_json({"folders": checked, "bad": [asdict(block) for block in bad]})
    elif found.folders:
        _print(reports, unreadable, found.silent, seconds)
    return 1 if bad or unreadable or found.silent else 0


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _verify(progress: Progress, path: str) -> Report:
    task = progress.add_task(os.path.basename(path)[:16], total=None)

    def verify() -> Report:
        return check_folder(
            OsFiles(),
            path,
            begin=lambda total: progress.update(task, total=total),
            advance=lambda count: progress.advance(task, count),
        )

    report = call_beside(path, verify)
    progress.remove_task(task)
    return report


def _print(reports: list[Report], unreadable: int, silent: list[str], seconds: float) -> None:
    for report in reports:
        line = f"{report.folder}: {blocks(report.blocks)}, {size(report.bytes)}"
        if report.replaced_blocks:
            line += f"; {blocks(report.replaced_blocks)} replaced meanwhile"
        print(line)
        by_reason: dict[str, list[BadBlock]] = {}
        for block in report.bad:
            by_reason.setdefault(block.reason, []).append(block)
        for reason, bad in by_reason.items():
            _print_bad(reason, bad)
    total, count = sum(report.read_bytes for report in reports), sum(len(r.bad) for r in reports)
    verdict = f"{count} bad" if count or unreadable or silent else "all intact"
    if unreadable:
        verdict += f", {unreadable} of {len(reports) + unreadable} folders not read"
    if silent:
        verdict += f", no answer from {';'.join(silent)}"
    print(f"{verdict}; read {size(total)} in {seconds:.1f} s")


def _print_bad(reason: str, bad: list[BadBlock]) -> None:
    if len(bad) > _LINES:
        print(f"  bad: {len(bad)} blocks, slots {bad[0].slot} to {bad[-1].slot}  {reason}")
        return
    for block in bad:
        place = "table" if block.slot is None else f"slot {block.slot}  key {block.key}"
        print(f"  bad: {place}  {reason}")


COMMAND = Command(
    "verify", "read every block and verify its checksum", __doc__, _add_arguments, _run
)
