# SPDX-License-Identifier: Apache-2.0
"""What the commands on cache directories share."""

from __future__ import annotations

import argparse
import json
import os

from flexkv.errors import DiskError
from flexkv.tiers.disk import directory

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="a cache directory, as in an engine's ssd_cache_dir"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def cache_folders(root: str) -> list[str]:
    """Absolute paths of the folders with a cache in the directory `root` of the command line.

    Raises:
        DiskError: it is no directory, cannot be read, or holds no cache.
    """
    path = os.path.abspath(root)
    if not os.path.exists(path):
        raise DiskError(_refusal(root, "does not exist"))
    if not os.path.isdir(path):
        raise DiskError(_refusal(root, "is not a directory"))
    found = directory.folders(path)
    if not found:
        raise DiskError(_refusal(root, "holds no cache that this user can read"))
    return found


def size(count: int) -> str:
    """`count` bytes for people."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]}" if unit else f"{count} bytes"


def blocks(count: int) -> str:
    """`count` blocks for people."""
    return "1 block" if count == 1 else f"{count:,} blocks"


def print_json(content: object) -> None:
    print(json.dumps(content, indent=2))


def _refusal(root: str, problem: str) -> str:
    return (
        f"{root!r} from DIR on the command line {problem}; allowed: a directory that an engine "
        f"with FlexKV has used, see its ssd_cache_dir"
    )
