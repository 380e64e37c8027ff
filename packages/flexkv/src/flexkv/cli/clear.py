# SPDX-License-Identifier: Apache-2.0
"""Remove all caches of a directory that no engine owns. Files that are not FlexKV's stay. The
command asks first; without a terminal to ask on, it needs --yes. Exit code 0 if all were removed, 1
if any was skipped."""

from __future__ import annotations

import argparse
import os
import sys

from flexkv.cli.common import add_directory, cache_folders, size
from flexkv.errors import ConfigError
from flexkv.tiers.disk import directory
from flexkv.tiers.disk.files import open_folder, reason_of
from flexkv.tiers.disk.inspect import owner_of
from flexkv.tiers.disk.removal import Removal, remove

NAME = "clear"
HELP = "remove the caches that no engine owns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    parser.add_argument("--yes", action="store_true", help="remove without asking")


def run(args: argparse.Namespace) -> int:
    folders = cache_folders(args.directory, leftovers=True)
    if not args.yes and not _confirmed(folders):
        print("nothing removed")
        return 1
    removed = [_remove(path) for path in folders]
    return 0 if all(removed) else 1


def _confirmed(folders: list[str]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "--yes is missing on the command line, and standard input is not a terminal; allowed: "
            "--yes, or a terminal"
        )
    for path in folders:
        print(path)
    try:
        answer = input(f"Remove {_count(folders)} (folders in use are skipped)? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in {"y", "yes"}


def _count(folders: list[str]) -> str:
    return "1 folder" if len(folders) == 1 else f"{len(folders)} folders"


def _remove(path: str) -> bool:
    """Remove one folder and print the outcome. False if it was skipped."""
    try:
        count = directory.disk_bytes(path)
        removal = remove(path)
        if removal is Removal.REMOVED:
            print(f"removed {path}, {size(count)}")
            return True
        problem = removal.value
        if removal is Removal.IN_USE:
            problem += f" by process {_owner(path)}"
        print(f"skipped {path}: {problem}")
    except OSError as error:
        print(f"skipped {path}: {reason_of(error)}")
    return False


def _owner(path: str) -> int | str:
    folder = open_folder(path)
    try:
        return owner_of(folder) or directory.owner(path)
    finally:
        os.close(folder)
