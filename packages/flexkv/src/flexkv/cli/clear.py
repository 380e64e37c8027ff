# SPDX-License-Identifier: Apache-2.0
"""Remove blocks. The first word says whose: those of cache directories, of shared stores, of
running services or engines, or those of one prompt or conversation. Each has options of its own,
and *all* is said by a word. The command asks first; without a terminal to ask on, it needs --yes.
Exit code 0 if all were removed, 1 if any was skipped or if the answer was no."""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flexkv.cli.common import (
    Command,
    Found,
    ask_services,
    find_folders,
    read_settings,
    split_services,
)
from flexkv.cli.engine_commands import (
    add_prompt,
    add_session,
    change_prompt,
    change_session,
    directory_of,
    name_of,
    print_failed,
    prompt_of,
    reason_text,
    session_of,
)
from flexkv.operators.ask_door import AskError, ask_engines, engines_in
from flexkv.operators.verbs import CLEAR, REMOVE, REMOVE_SESSION, ClearQuestion
from flexkv.service.state import clear_pools
from flexkv.settings import CacheConfig
from flexkv.tiers import epochs
from flexkv.tiers.disk.files import reason_of
from flexkv.tiers.disk.folder import describe_owner, disk_bytes, fingerprint_of
from flexkv.tiers.disk.removal import Removal, remove, would_remove
from flexkv.tiers.shared_store import SharedStore, all_stores, shared_stores
from flexkv.types.deadline import HungError, call_beside
from flexkv.types.errors import ConfigError
from flexkv.types.texts import blocks, printable, size

_ALL = "all"
_FINGERPRINT = re.compile("[0-9a-f]{32}")
"""What `flexkv.layout.fingerprint` makes."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to clear", metavar="WHAT", required=True)

    def kind(
        name: str,
        clear: Callable[[argparse.Namespace], int],
        text: str,
        *,
        has_dry_run: bool = True,
    ) -> argparse.ArgumentParser:
        own = kinds.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        own.add_argument("--yes", action="store_true", help="remove without asking")
        if has_dry_run:
            own.add_argument(
                "--dry-run", action="store_true", help="only say what would be removed"
            )
        own.set_defaults(clear=clear)
        return own

    own = kind(
        "folders",
        _clear_folders,
        "remove the folders of cache directories that no engine owns; files that are not FlexKV's "
        "stay",
    )
    own.add_argument(
        "directories",
        metavar="DIR",
        nargs="+",
        help="a cache directory, or several separated by `;`; `all` for those of the setting "
        "ssd_cache_dir",
    )
    own = kind(
        "stores",
        _clear_stores,
        "clear the shared stores that the settings name: no engine finds their old blocks any "
        "more, and running engines go on sharing",
    )
    _add_fingerprint(own, "blocks")
    own = kind(
        "service",
        _clear_services,
        "have running services drop all blocks of their memory and their disks; shared stores keep "
        "theirs",
    )
    _add_fingerprint(own, "the pool")
    own.add_argument(
        "directories",
        metavar="DIR",
        nargs="*",
        help="directory of a `flexkv serve`; default: the setting `service`",
    )
    own = kind(
        "engines",
        _clear_engines,
        "have this user's running engines drop all their blocks, in host memory and on disks",
    )
    _add_fingerprint(own, "the engines")
    own.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="an engine's runtime_dir; default: that setting",
    )
    own = kind(
        "prompt",
        _clear_prompt,
        "have this user's running engines remove the blocks of the prompt in FILE; see `flexkv "
        "lookup`",
        has_dry_run=False,
    )
    add_prompt(own)
    own = kind(
        "session",
        _clear_session,
        "have this user's running engines remove the blocks that only this conversation has",
        has_dry_run=False,
    )
    add_session(own)
    own = kind(
        "older",
        _clear_older,
        "remove the blocks that were written longer ago into the folder of objects_url=file:///PATH",
    )
    own.add_argument("age", metavar="AGE", help="a number and s, m, h or d, for example 7d")


def _add_fingerprint(parser: argparse.ArgumentParser, whose: str) -> None:
    parser.add_argument(
        "fingerprint", metavar="NAME", help=f"fingerprint of {whose}, or `all` for all"
    )


COMMAND = Command(
    "clear", "remove blocks", __doc__, _add_arguments, lambda args: int(args.clear(args))
)


def _clear_folders(args: argparse.Namespace) -> int:
    found = _folders(args.directories)
    if found.silent and not found.folders:
        return 1
    how = remove, "removed", "skipped"
    if args.dry_run:
        how = would_remove, "would remove", "would skip"
    else:
        count = "1 folder" if len(found.folders) == 1 else f"{len(found.folders)} folders"
        if not _agrees(args, f"Remove {count} (folders in use are skipped)?", found.folders):
            return 1
    removed = [_outcome(path, *how) for path in found.folders]
    return 0 if all(removed) and not found.silent else 1


def _folders(given: Sequence[str]) -> Found:
    """The folders to remove. Raises ConfigError if a directory is that of a service, or the
    settings name none, and DiskError if one cannot be read or holds no cache."""
    if list(given) == [_ALL]:
        if not read_settings().ssd_cache_dir:
            raise ConfigError(
                "DIR is 'all' on the command line, and ssd_cache_dir is not set; allowed: with "
                "this setting, or directories"
            )
        return find_folders([], leftovers=True)
    services, _ = split_services(given)
    if services:
        raise ConfigError(
            f"DIR is {services[0]!r} on the command line, the directory of a service; allowed: "
            "cache directories, or `flexkv clear service`"
        )
    return find_folders(given, leftovers=True)


def _clear_stores(args: argparse.Namespace) -> int:
    chosen = _fingerprint(args)
    config = read_settings()
    silent: list[str] = []

    def folders() -> list[str]:
        found = find_folders([], leftovers=True) if config.ssd_cache_dir else Found([], [])
        silent.extend(found.silent)
        return found.folders

    shared = shared_blocks(config, chosen, folders)
    lines = [f"{each.store}, fingerprint {each.fingerprint}" for each in shared]
    if _only_says(args, lines):
        return 1 if silent else 0
    if not _agrees(args, f"Clear {len(lines)} of shared stores for all engines?", lines):
        return 1
    cleared = [_clear(each, line) for each, line in zip(shared, lines, strict=True)]
    lacks = chosen is not None and not any(cleared)
    return 1 if lacks or silent or False in cleared else 0


class SharedBlocks(NamedTuple):
    """The blocks of one fingerprint in a shared store."""

    store: str
    """Its address, as in the settings."""
    fingerprint: str
    record: epochs.EpochRecord
    """What all engines read to find these blocks."""


def shared_blocks(
    config: CacheConfig, fingerprint: str | None, folders: Callable[[], Sequence[str]]
) -> list[SharedBlocks]:
    """List the blocks of a fingerprint, or of all if it is None, in the shared stores that the
    settings name. A bucket lists its fingerprints. Those of another store are those of buckets and
    of the folders in the cache directories, which `folders` finds.

    Raises:
        ConfigError: the settings name no shared store, no fingerprint is known, a store cannot be
            listed, or its client is not installed.
        StoreSettingError: a store cannot be used as the settings name it.
    """
    stores = list(shared_stores(config))
    if not stores:
        raise ConfigError(
            "the settings name no shared store; allowed: with "
            f"{' or '.join(each.setting for each in all_stores())} set"
        )
    given = None if fingerprint is None else [fingerprint]
    listed = {store: given or _listed(config, store) for store in stores}
    known: list[str] = []
    if None in listed.values():
        found = {each for names in listed.values() for each in names or ()}
        known = sorted(found.union(filter(None, map(fingerprint_of, folders()))))
    blocks = []
    for store, names in listed.items():
        address, own = str(store.address(config)), known if names is None else names
        if names is None:
            lists_none = f"{store.medium.value} at {address} does not list fingerprints"
            if not own:
                raise ConfigError(
                    f"NAME is 'all' on the command line, and {lists_none}; allowed: one that an "
                    "engine logs when it starts"
                )
            removed = "those of removed cache directories are left out; clear them by their names"
            print(f"{lists_none}: {removed}", file=sys.stderr)
        records = store.records(config, own)
        blocks += [SharedBlocks(address, *each) for each in zip(own, records, strict=True)]
    return blocks


def _listed(config: CacheConfig, store: SharedStore) -> list[str] | None:
    """The fingerprints that a store lists; None if it does not. Whoever can write to a bucket
    chooses the names there, which a terminal may obey: others than fingerprints are left out."""
    try:
        found = store.fingerprints(config)
    except OSError as error:
        raise ConfigError(
            f"{store.setting} is {store.address(config)!r}, which cannot be listed ({error}); "
            "allowed: a store that answers and that this user may list, or a fingerprint"
        ) from None
    return None if found is None else list(filter(_FINGERPRINT.fullmatch, found))


def _clear_services(args: argparse.Namespace) -> int:
    chosen = _fingerprint(args)
    roots = args.directories or [read_settings().service]
    if roots == [None]:
        raise ConfigError(
            "DIR is missing on the command line, and service is not set; allowed: one of them"
        )
    states, failed = ask_services(roots)
    pools = [
        f"{root}, fingerprint {pool.fingerprint}"
        for root, state in states.items()
        for pool in state.pools
        if chosen in (None, pool.fingerprint)
    ]
    if chosen is not None and states and not pools:
        print(f"no pool of {', '.join(states)} has the fingerprint {chosen!r}")
        return 1
    if _only_says(args, pools):
        return int(failed)
    if not _agrees(args, f"Clear {len(pools)} pools of running services?", pools):
        return 1
    cleared = [_clear_service(root, chosen) for root in states]
    return 0 if all(cleared) and not failed else 1


def _clear_service(root: str, fingerprint: str | None) -> bool:
    try:
        cleared = clear_pools(root, fingerprint)
    except AskError as error:
        print(f"skipped {root}: {error}")
        return False
    if cleared.reason:
        print(f"{root}: blocks on disk may be found again: {printable(cleared.reason)}")
    if not cleared.pools:
        print(f"nothing to clear in {root}: no engine has attached yet")
    for name, count in cleared.pools.items():
        print(f"cleared {root}, fingerprint {name}, {blocks(count)} of host memory")
    return not cleared.reason


def _clear_engines(args: argparse.Namespace) -> int:
    root, chosen = directory_of(args), _fingerprint(args)
    try:
        engines = engines_in(root, chosen)
    except AskError as error:
        print_failed([str(error)])
        return 1  # unasked, even if an engine starts now
    if _only_says(args, engines):
        return 0
    question = f"Clear the caches of {len(engines)} running engines in {root}?"
    if not _agrees(args, question, engines):
        return 1
    cleared, failed = ask_engines(root, chosen, CLEAR, ClearQuestion("all"))
    print_failed(failed)
    for each in cleared:
        had = f"cleared; host memory had {blocks(each.blocks)}"
        print(f"{name_of(each)}: {had}{reason_text(each.reason)}")
    return 1 if failed or not cleared or any(each.reason for each in cleared) else 0


def _clear_prompt(args: argparse.Namespace) -> int:
    question = prompt_of(args)
    where = directory_of(args)
    if not _agrees(args, f"Remove the blocks of this prompt in the engines of {where}?"):
        return 1
    effects, failed = change_prompt(args, REMOVE, question, "removed")
    stays = any(each.places.found or each.reason for each in effects)
    return 1 if failed or stays or not effects else 0


def _clear_session(args: argparse.Namespace) -> int:
    shown, where = printable(session_of(args).session), directory_of(args)
    if not _agrees(args, f"Remove the blocks of {shown!r} in the engines of {where}?"):
        return 1
    return change_session(args, REMOVE_SESSION, "removed")


def _clear_older(args: argparse.Namespace) -> int:
    age = re.fullmatch(r"([0-9]{1,9})([smhd])", args.age)
    if age is None:
        raise ConfigError(
            f"AGE is {args.age!r} on the command line; allowed: a number and s, m, h or d, for "
            "example 7d"
        )
    url = read_settings().objects_url
    if url is None or not url.startswith("file://"):
        given = "is not set" if url is None else f"is {url!r}"
        raise ConfigError(
            f"objects_url {given}; allowed: with objects_url=file:///PATH (a bucket's own "
            "lifecycle rules expire blocks)"
        )
    if not args.dry_run and not _agrees(args, f"Remove blocks older than {age[0]} in {url}?"):
        return 1
    from flexkv.tiers.objects.shared_folder import remove_older

    try:
        files, count = remove_older(url, int(age[1]) * _UNITS[age[2]], args.dry_run)
    except OSError as error:
        print(f"skipped {url}: {reason_of(error)}")
        return 1
    done = "would remove" if args.dry_run else "removed"
    print(f"{done} {files} blocks of {url}, {size(count)}")
    return 0


def _fingerprint(args: argparse.Namespace) -> str | None:
    """The fingerprint on the command line; None for all. Raises ConfigError if it cannot be one, so
    that it would clear nothing and say so."""
    text = str(args.fingerprint)
    if text == _ALL:
        return None
    if not _FINGERPRINT.fullmatch(text):
        raise ConfigError(
            f"NAME is {text!r} on the command line; allowed: `all`, or a fingerprint as an engine "
            "logs it when it starts, in lower-case hexadecimal digits"
        )
    return text


def _only_says(args: argparse.Namespace, lines: Sequence[str]) -> bool:
    """Whether the command line has --dry-run. Then these lines are what would be cleared."""
    for line in lines if args.dry_run else ():
        print(f"would clear {line}")
    return bool(args.dry_run)


def _agrees(args: argparse.Namespace, question: str, lines: Sequence[str] = ()) -> bool:
    """Ask a question behind the given lines, unless the command line has --yes. Returns whether the
    answer is yes."""
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(
            "--yes is missing on the command line, and standard input is not a terminal; allowed: "
            "--yes, or a terminal"
        )
    for line in lines:
        print(line)
    with contextlib.suppress(EOFError):
        if input(f"{question} [y/N] ").strip().lower() in {"y", "yes"}:
            return True
    print("nothing removed")
    return False


def _outcome(path: str, act: Callable[[str], Removal], done: str, skipped: str) -> bool:
    """Remove one folder by `act`, which is `remove` or `would_remove`, and print the outcome:
    `done` or `skipped` before the path. False if the folder stays."""
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


def _clear(shared: SharedBlocks, what: str) -> bool | None:
    """Clear one fingerprint of a shared store and print the outcome. False if it was skipped, None
    if the store has nothing of it."""
    try:
        is_cleared = epochs.clear(shared.record)
    except OSError as error:
        print(f"skipped {what}: {error}")
        return False
    print(f"cleared {what}" if is_cleared else f"nothing to clear in {what}")
    return is_cleared or None
