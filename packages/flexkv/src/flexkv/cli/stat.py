# SPDX-License-Identifier: Apache-2.0
"""Print the contents and counters of each folder of a cache directory, or the pools and engines of
the `flexkv serve` that runs in DIR. Without DIR, also the health of the running engines of this
user, whether they read from and write to their shared stores, and the directories that they cannot
open yet; if the setting `service` is set, only that service. The command changes nothing and works
beside running engines; their counters are at most some seconds old. Exit code 0, or 1 if a service
does not answer, or a folder cannot be read, or has lost parts of its table, a file of blocks or its
counters."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from datetime import timedelta

from msgspec import to_builtins

from flexkv.cli.common import (
    Command,
    Found,
    add_directories,
    add_json,
    ask_services,
    find_folders,
    print_json,
    read_settings,
    split_services,
)
from flexkv.cli.health import CacheHealth, engines_health
from flexkv.figures.definitions import (
    BLOCKS,
    BYTES,
    CAPACITY_BLOCKS,
    CAPACITY_BYTES,
    EXPIRED_BLOCKS,
    PINNED_BLOCKS,
    TIERS,
    sample,
)
from flexkv.operators.ask_door import beside
from flexkv.service.state import (
    FOUND_BLOCKS,
    GRANTED_BLOCKS,
    PROMPT_BLOCKS,
    STALLED_BLOCKS,
    EngineState,
    PoolState,
    ServiceState,
)
from flexkv.session.state_reports import read_states
from flexkv.tiers.circuit import word_of
from flexkv.tiers.disk.inspect import FolderState, folder_state
from flexkv.tiers.shared_store import shared_stores
from flexkv.types.deadline import call_beside
from flexkv.types.errors import DiskError
from flexkv.types.texts import blocks, printable, size

_IDENTITY = (
    "engine: ",
    "dtype: ",
    "kv_cache_dtype: ",
    "model_config.dtype: ",
    "cache_config.cache_dtype: ",
    "geometry: ",
)
"""The parts of a fingerprint by which people know a model, as either engine names them."""


@dataclass(slots=True)
class Totals:
    """Sums over folders. The names are those of `FolderState`; `folders` is the number of folders.

    `slots` and `used_slots` count blocks, which folders of different models have in different
    sizes.
    """

    folders: int = 0
    slots: int = 0
    used_slots: int = 0
    disk_bytes: int = 0
    used_bytes: int = 0
    hit_blocks: int = 0
    damaged_blocks: int = 0
    written_bytes: int = 0
    written_bytes_day: int = 0
    day_is_known: bool = True


@dataclass(frozen=True, slots=True)
class StoreState:
    """A shared store of a running engine, or a cache directory that the engine cannot open yet.

    Texts are `unknown`, and `owner` 0, if the engine's version does not report them. `owner` is the
    process id in the engine's PID namespace. The states of the circuits are `connecting` if the
    engine has not reached the store since its start.
    """

    store: str
    tier: str
    fingerprint: str
    owner: int
    reads: str
    writes: str

    @classmethod
    def of(cls, reported: Mapping[str, object]) -> StoreState:
        """Make the state from an entry of `read_states`."""
        names = ("store", "tier", "fingerprint", "reads", "writes")
        owner = reported.get("pid")
        return cls(
            **{name: str(reported.get(name, "unknown")) for name in names},
            owner=owner if isinstance(owner, int) else 0,
        )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directories(parser)
    add_json(parser)


def _run(args: argparse.Namespace) -> int:
    services, directories = _services(args.directories)
    answers, failed = ask_services(services)
    asks_folders = bool(directories) or not services
    found, stores, engines = _chosen(directories) if asks_folders else (Found([], []), [], [])
    states, unreadable = [], 0
    for path in found.folders:
        try:
            states.append(call_beside(path, functools.partial(folder_state, path)))
        except DiskError as error:
            print(error, file=sys.stderr)
            unreadable += 1
    lost = any(state.problem for state in states)
    code = 1 if unreadable or lost or found.silent or failed else 0
    totals = _total(states)
    if args.json:
        content: dict[str, object] = {
            "folders": [asdict(state) for state in states],
            "totals": asdict(totals),
        }
        if not args.directories:
            content["stores"] = [asdict(store) for store in stores]
            content["engines"] = [asdict(engine) for engine in engines]
        if services:
            content["services"] = {root: to_builtins(state) for root, state in answers.items()}
        print_json(content)
        return code
    for root, state in answers.items():
        print_service(root, state)
    for engine in engines:
        print(f"{engine.name}: {engine.text}")
    if asks_folders:
        _print_stores(stores)
        if found.folders:
            _print_folders(states, totals)
        elif not stores and not found.silent:
            print("no engine with shared stores runs")
    return code


def _services(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The services to print, and the cache directories. Without DIR the service of the settings."""
    if given:
        return split_services(given)
    root = read_settings().service
    return ([] if root is None else [root]), []


def _chosen(directories: Sequence[str]) -> tuple[Found, list[StoreState], list[CacheHealth]]:
    """The folders to print, and without DIR the stores and the health that running engines
    report."""
    if directories:
        return find_folders(directories), [], []
    config = read_settings()
    root = config.session_root
    stores, engines = beside(
        root, lambda: (list(map(StoreState.of, read_states(root))), engines_health(root))
    )
    stores.sort(key=astuple)
    has_store = stores or any(shared_stores(config))
    if has_store and not config.ssd_cache_dir:
        return Found([], []), stores, engines
    try:
        return find_folders([]), stores, engines
    except DiskError as error:
        # An engine may be waiting for this directory: its report says more.
        if not stores:
            raise
        print(error, file=sys.stderr)
        return Found([], list(config.ssd_cache_dir)), stores, engines


def _total(states: list[FolderState]) -> Totals:
    totals = Totals(folders=len(states))
    for name in {each.name for each in fields(Totals)} - {"folders", "day_is_known"}:
        setattr(totals, name, sum(getattr(state, name) for state in states))
    totals.day_is_known = all(state.day_is_known for state in states)
    return totals


def _print_stores(stores: Sequence[StoreState]) -> None:
    for store in stores:
        print(store.store)
        _print_line("tier", store.tier)
        _print_line("fingerprint", store.fingerprint)
        _print_line("in use", f"by process {store.owner}")
        _print_line("circuits", _circuits(store))
        print()


def _print_folders(states: Sequence[FolderState], totals: Totals) -> None:
    for state in states:
        print(state.path)
        if state.problem:
            _print_line("problem", state.problem)
        _print_line("fingerprint", state.fingerprint)
        _print_line("in use", "no" if state.owner is None else f"by process {state.owner}")
        if state.owner is not None:
            _print_line("circuits", _circuits(state))
        _print_line("block size", size(state.block_bytes) if state.slots else "unknown")
        _print_figures(state)
        print()
    print("1 folder in total" if len(states) == 1 else f"{len(states)} folders in total")
    _print_figures(totals)


def _circuits(of: StoreState | FolderState) -> str:
    return f"reads {word_of(str(of.reads))}, writes {word_of(str(of.writes))}"


def _print_figures(of: FolderState | Totals) -> None:
    _print_line("slots", f"{of.slots:,}, {of.used_slots:,} used")
    _print_line("on disk", f"{size(of.disk_bytes)}, {size(of.used_bytes)} used")
    _print_line("hits", blocks(of.hit_blocks))
    _print_line("damaged", blocks(of.damaged_blocks))
    least = "" if of.day_is_known else "at least "
    written = f"{size(of.written_bytes)}, {least}{size(of.written_bytes_day)} in the last 24 hours"
    _print_line("written", written)


def print_service(root: str, state: ServiceState) -> None:
    """Print the state of a service, and an empty line."""
    print(root)
    _print_line("service", f"FlexKV {printable(state.version)}, process {state.process}", 4)
    _print_line("up", str(timedelta(seconds=int(state.seconds))), 4)
    for problem in state.problems:
        _print_line("problem", problem, 4)
    for pool in state.pools:
        _print_pool(pool)
    print("  no engine has attached yet" if not state.pools else "")


def _print_pool(pool: PoolState) -> None:
    print(f"  pool {printable(pool.fingerprint)}")
    line = functools.partial(_print_line, indent=4)
    line("model", printable(pool.model))
    for part in pool.identity:
        if part.startswith(_IDENTITY):
            line("", printable(part))
    figures = pool.figures
    for tier in TIERS:
        room = figures.get(sample(CAPACITY_BLOCKS.name, tier))
        if not room:
            continue
        used, of = (figures[sample(each.name, tier)] for each in (BYTES, CAPACITY_BYTES))
        count = figures[sample(BLOCKS.name, tier)]
        expired = figures.get(sample(EXPIRED_BLOCKS.name, tier))
        line(
            tier,
            f"{size(int(used))} of {size(int(of))}, {count:,.0f} of {room:,.0f} blocks"
            + (f", {expired:,.0f} expired" if expired else ""),
        )
    line("block size", size(pool.slot_bytes))
    line("policy", pool.policy)
    line("pinned", blocks(int(figures.get(PINNED_BLOCKS.name, 0))))
    granted, stalled = (int(figures[each.name]) for each in (GRANTED_BLOCKS, STALLED_BLOCKS))
    line("granted", blocks(granted) + (f", {stalled:,} stalled" if stalled else ""))
    prompts, found = (figures[each.name] for each in (PROMPT_BLOCKS, FOUND_BLOCKS))
    if prompts:
        line("prompts", f"{prompts:,.0f} blocks, {100 * found / prompts:.1f} % found")
    for tenant in pool.tenants:
        name = printable(tenant.name) if tenant.name else "all others"
        line("tenant", f"{name}: {tenant.blocks:,} blocks, share {tenant.share:,.0f}")
    for engine in pool.engines:
        line("engine", _engine(engine))


def _engine(engine: EngineState) -> str:
    name = printable(engine.name)
    state = "attached" if engine.attached else "not attached"
    stalled = f", {engine.stalled_blocks:,} stalled" if engine.stalled_blocks else ""
    return (
        f"{name}: {state}, {blocks(engine.granted_blocks)} granted, {engine.held_blocks:,} held, "
        f"{engine.fetches} fetches{stalled}"
    )


def _print_line(name: str, value: str, indent: int = 2) -> None:
    print(f"{'':{indent}}{name:<{15 - indent}}{value}")


COMMAND = Command(
    "stat",
    "print contents of caches, and the state of shared stores",
    __doc__,
    _add_arguments,
    _run,
)
