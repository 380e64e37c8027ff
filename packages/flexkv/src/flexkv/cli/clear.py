# SPDX-License-Identifier: Apache-2.0
"""Remove all caches of directories that no engine owns. Files that are not FlexKV's stay. Without
DIR, the command also clears the shared stores that the settings name: no engine finds their old
blocks any more, and running engines go on sharing. The command asks first; without a terminal to
ask on, it needs --yes. With --dry-run it only says what it would do. With --older-than it only
removes old blocks of a shared folder. If DIR is that of a `flexkv serve` that runs, the service
drops all blocks of its memory and its disks; shared stores keep theirs. With --engine, the running
engines in the runtime directory DIR drop all their blocks, with --prefix those of one prompt, with
--session those that only one conversation has. Exit code 0 if all were removed, 1 if any was
skipped or if the answer was no."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from flexkv.cli import clear_engine
from flexkv.cli.clear_prefix import add_prefix, clear_prefix
from flexkv.cli.clear_session import clear_session
from flexkv.cli.common import (
    Found,
    add_directories,
    find_folders,
    read_settings,
    split_services,
)
from flexkv.cli.shared import SharedBlocks, is_fingerprint, remove_older, shared_blocks
from flexkv.cli.stat_service import ask_services
from flexkv.service.ask import ServiceError, clear_pools
from flexkv.tiers.disk.files import reason_of
from flexkv.tiers.disk.folder import describe_owner, disk_bytes
from flexkv.tiers.disk.removal import Removal, remove, would_remove
from flexkv.tiers.shared_store import all_stores, shared_stores
from flexkv.types.deadline import HungError, call_beside
from flexkv.types.errors import ConfigError
from flexkv.types.texts import blocks, printable, size

NAME = "clear"
HELP = "remove the caches that no engine owns, and clear shared stores"


READS: Mapping[str, Sequence[str]] = {
    "--engine": ("DIR", "--yes", "--dry-run", "--fingerprint"),
    "--session": ("DIR", "--yes", "--fingerprint", "--salt"),
    "--prefix": ("DIR", "--yes", "--fingerprint", "--salt", "--hashes"),
    "--older-than": ("--yes", "--dry-run"),
    "": ("DIR", "several DIR", "--yes", "--dry-run", "--fingerprint"),
}
"""By mode, which is the option that chooses it, the other options that it reads."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    add_directories(parser)
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    parser.add_argument(
        "--dry-run", action="store_true", help="only say what would be removed and cleared"
    )
    parser.add_argument(
        "--fingerprint",
        metavar="NAME",
        help="in shared stores, clear only the blocks of this fingerprint; folders are removed "
        "whatever their fingerprint",
    )
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        help="only remove the blocks that were written longer ago into the folder of "
        "objects_url=file:///PATH: a number and s, m, h or d, for example 7d",
    )
    parser.add_argument(
        "--engine",
        action="store_true",
        help="have the running engines whose runtime_dir is DIR drop all blocks, in host memory "
        "and on disks",
    )
    add_prefix(parser)
    parser.add_argument(
        "--session",
        metavar="NAME",
        help="have the running engines whose runtime_dir is DIR remove the blocks that only this "
        "conversation has",
    )


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    given = [_word(name) for name, value in vars(args).items() if _is_given(name, value)]
    mode = next((each for each in READS if each in given), "")
    if len(args.directories) > 1:
        given.append("several DIR")
    # An option that is not read may have been meant to limit what is removed.
    unread = next((each for each in given if each != mode and each not in READS[mode]), None)
    if unread is not None:
        raise ConfigError(
            f"{mode or 'clear'} is on the command line with {unread}; allowed: "
            f"{', '.join(READS[mode])}"
        )
    if mode == "--engine":
        return clear_engine.clear_engine(args, _agrees)
    if mode == "--session":
        return clear_session(args, _agrees)
    if mode == "--prefix":
        return clear_prefix(args, _agrees)
    return _remove_older(args) if mode else _clear_all(args)


def _is_given(name: str, value: object) -> bool:
    return name != "command" and value is not None and value is not False and value != []


def _word(name: str) -> str:
    return "DIR" if name == "directories" else f"--{name.replace('_', '-')}"


def _clear_all(args: argparse.Namespace) -> int:
    """Clear directories, and the shared stores of the settings."""
    services, directories = split_services(args.directories)
    if services:
        return _clear_services(services, directories, args)
    shared, found = _chosen(args.directories, args.fingerprint)
    if found.silent and not found.folders and not shared:
        return 1
    if args.dry_run:
        would = [
            _outcome(path, would_remove, "would remove", "would skip") for path in found.folders
        ]
        for each in shared:
            print(f"would clear {each.store}, fingerprint {each.fingerprint}")
        return 0 if all(would) and not found.silent else 1
    if not args.yes and not _confirmed(found.folders, shared):
        print("nothing removed")
        return 1
    removed = [_outcome(path, remove, "removed", "skipped") for path in found.folders]
    cleared = [_clear(each) for each in shared]
    lacks = args.fingerprint is not None and not any(cleared)
    return 0 if all(removed) and False not in cleared and not lacks and not found.silent else 1


def _clear_services(
    services: Sequence[str], directories: Sequence[str], args: argparse.Namespace
) -> int:
    if directories:
        raise ConfigError(
            f"DIR is {directories[0]!r} on the command line beside {services[0]!r}, the directory "
            f"of a service; allowed: directories of services alone, or cache directories alone"
        )
    _check_fingerprint(args.fingerprint)
    states, failed = ask_services(services)
    pools = [
        f"{root}, fingerprint {pool.fingerprint}"
        for root, state in states.items()
        for pool in state.pools
        if args.fingerprint in (None, pool.fingerprint)
    ]
    if args.fingerprint is not None and states and not pools:
        print(f"no pool of {', '.join(states)} has the fingerprint {args.fingerprint!r}")
        return 1
    if args.dry_run:
        for each in pools:
            print(f"would clear {each}")
        return int(failed)
    if not args.yes and not _agrees(f"Clear {len(pools)} pools of running services?", pools):
        print("nothing removed")
        return 1
    cleared = [_clear_service(root, args.fingerprint) for root in states]
    return 0 if all(cleared) and not failed else 1


def _clear_service(root: str, fingerprint: str | None) -> bool:
    try:
        cleared = clear_pools(root, fingerprint)
    except ServiceError as error:
        print(f"skipped {root}: {error}")
        return False
    if cleared.reason:
        print(f"{root}: blocks on disk may be found again: {printable(cleared.reason)}")
    if not cleared.pools:
        print(f"nothing to clear in {root}: no engine has attached yet")
    for name, count in cleared.pools.items():
        print(f"cleared {root}, fingerprint {name}, {blocks(count)} of host memory")
    return not cleared.reason


def _remove_older(args: argparse.Namespace) -> int:
    age = re.fullmatch(r"([0-9]{1,9})([smhd])", args.older_than)
    if age is None:
        raise ConfigError(
            f"--older-than is {args.older_than!r} on the command line; allowed: a number and s, m, "
            "h or d, for example 7d"
        )
    config = read_settings()
    asks = not args.yes and not args.dry_run
    if asks and not _agrees(f"Remove blocks older than {age[0]} in {config.objects_url}?"):
        print("nothing removed")
        return 1
    try:
        files, count = remove_older(config, int(age[1]) * _UNITS[age[2]], args.dry_run)
    except OSError as error:
        print(f"skipped {config.objects_url}: {reason_of(error)}")
        return 1
    done = "would remove" if args.dry_run else "removed"
    print(f"{done} {files} blocks of {config.objects_url}, {size(count)}")
    return 0


def _chosen(
    directories: Sequence[str], fingerprint: str | None
) -> tuple[list[SharedBlocks], Found]:
    """The blocks to clear in shared stores, and the folders to remove.

    Raises:
        ConfigError: the settings are wrong or name nothing, a bucket cannot be listed, no
            fingerprint is known, or the given one is malformed or chooses nothing.
        DiskError: a directory cannot be read or holds no cache; see `find_folders`.
        StoreSettingError: a store cannot be used as the settings name it.
    """
    _check_fingerprint(fingerprint)
    if directories:
        if fingerprint is not None:
            raise _needless(fingerprint, "DIR is cleared, and no shared store")
        return [], find_folders(directories, leftovers=True)
    config = read_settings()
    has_store = any(shared_stores(config))
    if fingerprint is not None and not has_store:
        raise _needless(fingerprint, "the settings name no shared store")
    found = Found([], [])
    if config.ssd_cache_dir or not has_store:
        found = find_folders([], leftovers=True)
    return shared_blocks(config, fingerprint, found.folders), found


def _check_fingerprint(text: str | None) -> None:
    """Refuse a text that cannot be a fingerprint, which would clear nothing and say so."""
    if text is not None and not is_fingerprint(text):
        raise ConfigError(
            f"--fingerprint is {text!r} on the command line; allowed: a fingerprint as an engine "
            "logs it when it starts, in lower-case hexadecimal digits"
        )


def _needless(fingerprint: str, why: str) -> ConfigError:
    """A fingerprint chooses blocks of shared stores. Where none is cleared, the user may expect
    that it chooses folders, all of which would be removed."""
    return ConfigError(
        f"--fingerprint is {fingerprint!r} on the command line, but {why}; allowed: without DIR, "
        f"and with {' or '.join(each.setting for each in all_stores())} set"
    )


def _confirmed(folders: list[str], shared: list[SharedBlocks]) -> bool:
    lines = [*folders, *(f"{each.store}, fingerprint {each.fingerprint}" for each in shared)]
    what = f"Remove {_count(folders)} (folders in use are skipped)"
    if shared:
        what += f", and clear {len(shared)} of shared stores for all engines"
    return _agrees(f"{what}?", lines)


def _agrees(question: str, lines: Sequence[str] = ()) -> bool:
    """Ask a question behind the given lines. Returns whether the answer is yes."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "--yes is missing on the command line, and standard input is not a terminal; allowed: "
            "--yes, or a terminal"
        )
    for line in lines:
        print(line)
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in {"y", "yes"}


def _count(folders: list[str]) -> str:
    return "1 folder" if len(folders) == 1 else f"{len(folders)} folders"


def _outcome(path: str, act: Callable[[str], Removal], done: str, skipped: str) -> bool:
    """Remove one folder and print the outcome. False if the folder stays.

    Args:
        path: the folder.
        act: `remove`, or `would_remove`.
        done: what is printed before the path.
        skipped: likewise, if the folder stays.
    """
    try:
        whole, line = call_beside(path, functools.partial(_try, path, act, done, skipped))
    except HungError as error:
        whole, line = False, f"{skipped} {path}: {error}"
    except OSError as error:
        whole, line = False, f"{skipped} {path}: {reason_of(error)}"
    print(line)
    return whole


def _try(path: str, act: Callable[[str], Removal], done: str, skipped: str) -> tuple[bool, str]:
    """Whether `act` removes a whole folder, and the line that says so."""
    count = disk_bytes(path)
    removal = act(path)
    if removal is Removal.IN_USE:
        return False, f"{skipped} {path}: {removal.value} by process {describe_owner(path)}"
    if removal is Removal.FOREIGN_FILES:
        return False, f"{done} FlexKV's files in {path}, which {removal.value} and stays"
    return True, f"{done} {path}, {size(count)}"


def _clear(shared: SharedBlocks) -> bool | None:
    """Clear one fingerprint of a shared store and print the outcome. False if it was skipped, None
    if the store has nothing of it."""
    what = f"{shared.store}, fingerprint {shared.fingerprint}"
    try:
        is_cleared = shared.clear()
    except OSError as error:
        print(f"skipped {what}: {error}")
        return False
    print(f"cleared {what}" if is_cleared else f"nothing to clear in {what}")
    return is_cleared or None
