# SPDX-License-Identifier: Apache-2.0
"""Read every block of a cache directory and check it. Changes nothing, and works beside engines: a
block that one replaces meanwhile is not bad. Exit code 0 if all blocks are intact, 1 if not."""

from __future__ import annotations

import argparse
import os
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

from flexkv.cli.common import add_directory, add_json, blocks, cache_folders, print_json, size
from flexkv.tiers.disk.files import OsFiles
from flexkv.tiers.disk.verify import Report, verify_folder

NAME = "verify"
HELP = "read every block and check it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    folders = cache_folders(args.directory)
    begun = time.monotonic()
    with _progress() as progress:
        reports = [_verify(progress, path) for path in folders]
    seconds = time.monotonic() - begun
    bad = [block for report in reports for block in report.bad]
    if args.json:
        checked = [
            {name: value for name, value in asdict(report).items() if name != "bad"}
            for report in reports
        ]
        print_json({"folders": checked, "bad": [asdict(block) for block in bad]})
    else:
        _print(reports, seconds)
    return 1 if bad else 0


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
    report = verify_folder(
        OsFiles(),
        path,
        begin=lambda total: progress.update(task, total=total),
        advance=lambda count: progress.advance(task, count),
    )
    progress.remove_task(task)
    return report


def _print(reports: list[Report], seconds: float) -> None:
    for report in reports:
        line = f"{report.folder}: {blocks(report.blocks)}, {size(report.bytes)}"
        if report.replaced_blocks:
            line += f"; {blocks(report.replaced_blocks)} replaced meanwhile"
        print(line)
        for block in report.bad:
            place = "table" if block.slot is None else f"slot {block.slot}  key {block.key}"
            print(f"  bad: {place}  {block.reason}")
    total, count = sum(report.bytes for report in reports), sum(len(r.bad) for r in reports)
    verdict = f"{count} bad" if count else "all intact"
    print(f"{verdict}; read {size(total)} in {seconds:.1f} s")
