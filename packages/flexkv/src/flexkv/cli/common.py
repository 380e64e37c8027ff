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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flexkv.operators.ask_door import AskError
from flexkv.service.state import ServiceState, is_service, state_of
from flexkv.settings import CONFIG_PATH_VARIABLE, CacheConfig, load_config
from flexkv.tiers.disk.folder import folders as folders_below
from flexkv.types.deadline import ANSWER_SECONDS, HANGS, call_within
from flexkv.types.errors import ConfigError, DiskError
from flexkv.types.texts import exact


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `flexkv`."""

    name: str
    help: str
    """One line for `flexkv --help`."""
    text: str | None
    """What its own `--help` prints."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code. FlexKVError, as of the `type` of an option, is wrong usage: `main`
    prints it and returns 2. OSError is an output that cannot be written: `main` returns 1."""


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


def number(option: str, least: float, most: float, allowed: str = "") -> Callable[[str], float]:
    """Make the `type` of an option that is a number from `least` to `most`; `allowed` says so in
    the error."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := float(text)) <= most:
                return value
        known = allowed or f"a number from {exact(least)} to {exact(most)}"
        raise ConfigError(f"{text!r} from {option}; allowed: {known}")

    return read


def has_service(root: str) -> bool:
    """Whether a directory is that of a service. One that cannot be read counts as none: whoever
    reads it then has the clearer error. Waits as long as the directory does."""
    with contextlib.suppress(OSError):
        return is_service(root)
    return False


def split_services(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split each DIR of the command line into directories of services and cache directories. One
    that does not answer within a second counts as a cache directory."""
    parts = _split(given)
    found = call_within({each: functools.partial(has_service, each) for each in parts}, 1.0)
    services = [each for each in parts if found.get(each)]
    return services, [each for each in parts if each not in services]


def ask_services(roots: Sequence[str]) -> tuple[dict[str, ServiceState], bool]:
    """Ask the services in these directories, and return the answers, and whether any is missing.
    Those that do not answer are named on standard error."""
    answers: dict[str, ServiceState] = {}
    for root in roots:
        try:
            answers[root] = state_of(root)
        except AskError as error:
            print(error, file=sys.stderr)
    return answers, len(answers) < len(roots)


@dataclass(frozen=True, slots=True)
class Found:
    """Absolute paths of FlexKV's folders in some directories, and those of the directories, as the
    user named them, that did not answer within `ANSWER_SECONDS`."""

    folders: list[str]
    silent: list[str]


def find_folders(given: Sequence[str], leftovers: bool = False) -> Found:
    """Find FlexKV's folders in each DIR of the command line, or in the directories of the settings
    if none is given. With `leftovers`, also folders whose removal was interrupted. Directories that
    do not answer within `ANSWER_SECONDS` are named on standard error.

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
    return Found(_all_of(answers, source), silent)


def cache_folders(given: str) -> list[str]:
    """As `find_folders` for one DIR, without a time limit."""
    roots, source = _roots([given])
    return _all_of({root: _look(root, source, False) for root in roots}, source)


def read_settings() -> CacheConfig:
    """The settings in force, as `load_config` reads them. Raises ConfigError if they are wrong, or
    their file does not answer within `ANSWER_SECONDS`."""
    read = call_within({"settings": load_config}, ANSWER_SECONDS)
    if "settings" not in read:
        path = os.environ.get(CONFIG_PATH_VARIABLE)
        raise ConfigError(
            f"{path!r} from {CONFIG_PATH_VARIABLE} has not answered for {ANSWER_SECONDS:g} s: "
            f"{HANGS}; allowed: a file that can be read"
        )
    return read["settings"]


def default_root() -> str:
    """The directory of the service that the settings name, else the engines' runtime directory."""
    config = read_settings()
    return config.service or config.session_root


def _look(root: str, source: str, leftovers: bool) -> list[str] | DiskError:
    """FlexKV's folders in a directory, or why it cannot be used."""
    try:
        return _folders_in(root, source, leftovers)
    except DiskError as error:
        return error


def _folders_in(root: str, source: str, leftovers: bool) -> list[str]:
    if not root:  # as of an empty variable; it does not mean the current directory
        raise _refused(root, source, "is empty")
    path = os.path.abspath(root)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _refused(root, source, "does not exist") from None
    except OSError as error:
        raise _refused(root, source, f"cannot be read ({error.strerror})") from None
    if not stat.S_ISDIR(mode):
        raise _refused(root, source, "is not a directory")
    return folders_below(path, leftovers)


def _all_of(found: Mapping[str, list[str] | DiskError], source: str) -> list[str]:
    """The folders of all directories, each once. Raises DiskError if one cannot be used, or none
    has a folder."""
    folders: dict[str, None] = {}
    for each in found.values():
        if isinstance(each, DiskError):
            raise each
        folders |= dict.fromkeys(each)
    if found and not folders:
        raise _refused(";".join(found), source, "holds no cache of FlexKV")
    return [*folders]


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


def _refused(root: str, source: str, problem: str) -> DiskError:
    return DiskError(
        f"{root!r} from {source} {problem}; allowed: a directory that an engine with FlexKV has "
        f"used (see its ssd_cache_dir), or that of a `flexkv serve` that runs"
    )
