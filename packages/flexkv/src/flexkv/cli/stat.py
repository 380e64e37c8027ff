# SPDX-License-Identifier: Apache-2.0
"""Print the contents and counters of each folder of a cache directory. The command changes nothing
and works beside running engines; their counters are at most some seconds old. Exit code 0, or 1 if
a folder cannot be read."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, fields

from flexkv.cli.common import add_directory, add_json, blocks, cache_folders, print_json, size
from flexkv.errors import DiskError
from flexkv.tiers.disk.inspect import FolderState, folder_state

NAME = "stat"
HELP = "print the contents and counters of a cache directory"


@dataclass(slots=True)
class Totals:
    """Sums over folders, under the names of `FolderState`."""

    folders: int = 0
    slots: int = 0
    used_slots: int = 0
    disk_bytes: int = 0
    used_bytes: int = 0
    hit_blocks: int = 0
    damaged_blocks: int = 0
    written_bytes: int = 0
    written_bytes_day: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    states, unreadable = [], 0
    for path in cache_folders(args.directory):
        try:
            states.append(folder_state(path))
        except DiskError as error:
            print(error, file=sys.stderr)
            unreadable += 1
    code = 1 if unreadable else 0
    totals = _total(states)
    if args.json:
        content = {"folders": [asdict(state) for state in states], "totals": asdict(totals)}
        print_json(content)
        return code
    for state in states:
        owner = "no" if state.owner is None else f"by process {state.owner}"
        print(state.path)
        _print_line("fingerprint", state.fingerprint)
        _print_line("in use", owner)
        if state.owner is not None:
            _print_line("circuits", f"reads {state.reads}, writes {state.writes}")
        _print_line("block size", size(state.block_bytes) if state.slots else "unknown")
        _print_figures(state)
        print()
    print("1 folder in total" if len(states) == 1 else f"{len(states)} folders in total")
    _print_figures(totals)
    return code


def _total(states: list[FolderState]) -> Totals:
    totals = Totals(folders=len(states))
    for name in [each.name for each in fields(Totals) if each.name != "folders"]:
        setattr(totals, name, sum(getattr(state, name) for state in states))
    return totals


def _print_figures(of: FolderState | Totals) -> None:
    _print_line("slots", f"{of.slots:,}, {of.used_slots:,} used")
    _print_line("on disk", f"{size(of.disk_bytes)}, {size(of.used_bytes)} used")
    _print_line("hits", blocks(of.hit_blocks))
    _print_line("damaged", blocks(of.damaged_blocks))
    written = f"{size(of.written_bytes)}, {size(of.written_bytes_day)} in the last 24 hours"
    _print_line("written", written)


def _print_line(name: str, value: str) -> None:
    print(f"  {name:<13}{value}")
