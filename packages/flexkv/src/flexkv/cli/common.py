# SPDX-License-Identifier: Apache-2.0
"""Arguments and output that the commands on cache directories share."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flexkv.service.ask import is_service
from flexkv.settings import CONFIG_PATH_VARIABLE, CacheConfig, load_config
from flexkv.tiers.disk.folder import folders as folders_below
from flexkv.types.deadline import ANSWER_SECONDS, HANGS, call_within
from flexkv.types.errors import ConfigError, DiskError


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `flexkv`.

    Attributes:
        name: its first argument, as in `flexkv stat`.
        help: one line for `flexkv --help`.
        text: what its own `--help` prints.
        add_arguments: adds its arguments. Numbers are texts, so that errors about them look like
            all others.
        run: runs it and returns its exit code. FlexKVError is wrong usage: `main` prints it and
            returns 2. OSError is an output that cannot be written: `main` returns 1.
    """

    name: str
    help: str
    text: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_directories(parser: argparse.ArgumentParser) -> None:
    """Add the arguments DIR; their value is the list `directories`, empty if there are none."""
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="*",
        help="a cache directory, or several separated by `;`, as in an engine's ssd_cache_dir; "
        "default: that setting, from the environment or the file named by FLEXKV_CONFIG_PATH",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json; its value is `json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def split_services(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split each DIR of the command line into directories of services and cache directories. One
    that does not answer within a second, or cannot be read, counts as a cache directory."""
    parts = _split(given)
    found = call_within({each: functools.partial(has_service, each) for each in parts}, 1.0)
    services = [each for each in parts if found.get(each)]
    return services, [each for each in parts if each not in services]


def has_service(root: str) -> bool:
    """Whether a directory is that of a service. One that cannot be read counts as none, because
    whoever reads it then has the clearer error. Waits as long as the directory does."""
    with contextlib.suppress(OSError):
        return is_service(root)
    return False


@dataclass(frozen=True, slots=True)
class Found:
    """Absolute paths of FlexKV's folders in some directories, and those of the directories, as the
    user named them, that did not answer within `ANSWER_SECONDS`."""

    folders: list[str]
    silent: list[str]


def find_folders(given: Sequence[str], leftovers: bool = False) -> Found:
    """Find FlexKV's folders in the given directories, or in those of the settings.

    Directories that do not answer within `ANSWER_SECONDS` are named on standard error; the folders
    of the others are returned.

    Args:
        given: each DIR of the command line; none for the directories of the settings.
        leftovers: include folders whose removal was interrupted.

    Raises:
        ConfigError: DIR is missing, and the settings name no directory or are wrong.
        DiskError: a path is not a directory or cannot be read, or no directory that answers holds
            a cache.
    """
    roots, source = _roots(given)
    looks = {root: functools.partial(_look, root, source, leftovers) for root in roots}
    answers = call_within(looks, ANSWER_SECONDS)
    silent = [root for root in looks if root not in answers]
    for root in silent:
        problem = f"has not answered for {ANSWER_SECONDS:g} s: {HANGS}"
        print(f"{root!r} from {source} {problem}", file=sys.stderr)
    answering = [root for root in looks if root in answers]
    found = _folders_of(answers[root] for root in answering)
    if answering and not found:
        raise _no_cache(answering, source)
    return Found(found, silent)


def cache_folders(given: str) -> list[str]:
    """Absolute paths of FlexKV's folders in DIR of the command line, at least one. Has no time
    limit.

    Raises:
        DiskError: a path is not a directory or cannot be read, or no directory holds a cache.
    """
    roots, source = _roots([given])
    found = _folders_of(_look(root, source, False) for root in roots)
    if not found:
        raise _no_cache(roots, source)
    return found


def read_settings() -> CacheConfig:
    """The settings in force, as `load_config` reads them.

    Raises:
        ConfigError: they are wrong, or their file does not answer within `ANSWER_SECONDS`.
    """
    read = call_within({"settings": load_config}, ANSWER_SECONDS)
    if "settings" not in read:
        path = os.environ.get(CONFIG_PATH_VARIABLE)
        raise ConfigError(
            f"{path!r} from {CONFIG_PATH_VARIABLE} has not answered for {ANSWER_SECONDS:g} s: "
            f"{HANGS}; allowed: a file that can be read"
        )
    return read["settings"]


def _look(root: str, source: str, leftovers: bool) -> list[str] | DiskError:
    """FlexKV's folders in a directory, or why it cannot be used."""
    if not root:  # as of an empty variable; it does not mean the current directory
        return DiskError(_refusal(root, source, "is empty"))
    path = os.path.abspath(root)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return DiskError(_refusal(root, source, "does not exist"))
    except OSError as error:
        return DiskError(_refusal(root, source, f"cannot be read ({error.strerror})"))
    if not stat.S_ISDIR(mode):
        return DiskError(_refusal(root, source, "is not a directory"))
    try:
        return folders_below(path, leftovers)
    except DiskError as error:
        return error


def _folders_of(looks: Iterable[list[str] | DiskError]) -> list[str]:
    found: list[str] = []
    for look in looks:
        if isinstance(look, DiskError):
            raise look
        found += look
    return list(dict.fromkeys(found))


def _no_cache(roots: Sequence[str], source: str) -> DiskError:
    return DiskError(_refusal(";".join(roots), source, "holds no cache of FlexKV"))


def _split(given: Sequence[str]) -> list[str]:
    parts = [[part for part in each.split(";") if part] or [each] for each in given]
    return [*itertools.chain.from_iterable(parts)]


def _roots(given: Sequence[str]) -> tuple[Sequence[str], str]:
    """The directories, and their source."""
    if given:
        return _split(given), "DIR on the command line"
    roots = read_settings().ssd_cache_dir
    if not roots:
        raise ConfigError(
            "DIR is missing on the command line, and ssd_cache_dir is not set; allowed: one of them"
        )
    return roots, "ssd_cache_dir"


def print_json(content: object) -> None:
    """Print `content` as indented JSON to standard output."""
    print(json.dumps(content, indent=2))


def _refusal(root: str, source: str, problem: str) -> str:
    return (
        f"{root!r} from {source} {problem}; allowed: a directory that an engine with FlexKV has "
        f"used (see its ssd_cache_dir), or that of a `flexkv serve` that runs"
    )
