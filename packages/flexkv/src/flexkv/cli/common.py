# SPDX-License-Identifier: Apache-2.0
"""Arguments and output that the commands on cache directories share."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from flexkv.config_sources import load_config
from flexkv.errors import ConfigError, DiskError
from flexkv.tiers.disk import directory

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="a cache directory, or several separated by `;`, as in an engine's ssd_cache_dir; "
        "default: that setting, from the environment or the file named by FLEXKV_CONFIG_PATH",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def cache_folders(given: str | None, leftovers: bool = False) -> list[str]:
    """Absolute paths of FlexKV's folders in the given directories, or in those of the settings.

    Args:
        given: DIR of the command line; None for the directories of the settings.
        leftovers: include folders whose removal was interrupted.

    Raises:
        ConfigError: DIR is missing, and the settings name no directory or are wrong.
        DiskError: a path is not a directory or cannot be read, or no directory holds a cache.
    """
    roots, source = _roots(given)
    found = []
    for root in roots:
        path = os.path.abspath(root)
        if not os.path.exists(path):
            raise DiskError(_refusal(root, source, "does not exist"))
        if not os.path.isdir(path):
            raise DiskError(_refusal(root, source, "is not a directory"))
        found += directory.folders(path, leftovers)
    if not found:
        raise DiskError(_refusal(";".join(roots), source, "holds no cache of FlexKV"))
    return found


def _roots(given: str | None) -> tuple[Sequence[str], str]:
    """The directories, and their source."""
    if given is not None:
        return [part for part in given.split(";") if part] or [given], "DIR on the command line"
    roots = load_config().ssd_cache_dir
    if not roots:
        raise ConfigError(
            "DIR is missing on the command line, and ssd_cache_dir is not set; allowed: one of them"
        )
    return roots, "ssd_cache_dir"


def size(count: int) -> str:
    """`count` bytes with a unit."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {_UNITS[unit]}" if unit else f"{count} bytes"


def blocks(count: int) -> str:
    """`count` blocks with the noun."""
    return "1 block" if count == 1 else f"{count:,} blocks"


def print_json(content: object) -> None:
    print(json.dumps(content, indent=2))


def _refusal(root: str, source: str, problem: str) -> str:
    return (
        f"{root!r} from {source} {problem}; allowed: a directory that an engine with FlexKV has "
        f"used (see its ssd_cache_dir)"
    )
