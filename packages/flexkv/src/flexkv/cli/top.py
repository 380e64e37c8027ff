# SPDX-License-Identifier: Apache-2.0
"""Show live what FlexKV does: hit rates, saved prefill time, links, room, failures. TARGET is an
engine's address, as http://HOST:PORT, or a cache directory; several are shown one below the other.
An engine may go away and come back. Ctrl-C ends the command. Without a terminal, or with --once,
the figures are printed once. Exit code 0, or 1 if a target gave no figures in the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live

from flexkv.cli.top_metrics import Reading
from flexkv.cli.top_sources import Source, address_of, folders_of, is_address, scrape
from flexkv.cli.top_view import EngineHistory, show_directory, show_engine
from flexkv.errors import ConfigError
from flexkv.tiers.disk.inspect import FolderState

NAME = "top"
HELP = "show live what engines and cache directories do"

_INTERVAL_SECONDS = 2.0
_LEAST_SECONDS, _MOST_SECONDS = 0.2, 3600.0
_FIRST_SECONDS = 8.0
"""How long `--once` waits for a target. An engine may take 5 s; see `top_sources`."""
_MOST_TARGETS = 16
_PIPE_COLUMNS = 120
"""Where there is no terminal, all columns of the tables have room."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A target and its figures."""

    source: Source[Reading] | Source[Sequence[FolderState]]
    render: Callable[[], RenderableType]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets", metavar="TARGET", nargs="+", help="an engine's address, or a cache directory"
    )
    parser.add_argument("--once", action="store_true", help="print the figures once")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        default=str(_INTERVAL_SECONDS),
        help=f"between two looks; default: {_INTERVAL_SECONDS:g}",
    )


def run(args: argparse.Namespace) -> int:
    interval = _interval(args.interval)
    targets: list[str] = args.targets
    if len(targets) > _MOST_TARGETS:
        raise ConfigError(
            f"{len(targets)} targets on the command line; allowed: up to {_MOST_TARGETS}"
        )
    for target in targets:
        if targets.count(target) > 1:
            raise ConfigError(
                f"{target!r} is {targets.count(target)} times on the command line; allowed: once"
            )
    shown = [_shown(target) for target in targets]
    for each in shown:
        each.source.start(interval)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_COLUMNS)
    if args.once or not console.is_terminal:
        deadline = time.monotonic() + _FIRST_SECONDS
        for each in shown:
            each.source.wait(max(0.0, deadline - time.monotonic()))
        console.print(Group(*(each.render() for each in shown)))
        # A thread that hangs in a read of a drive must not keep the process.
        sys.stdout.flush()
    else:
        _show(console, shown, interval)
    return 1 if any(each.source.look.error is not None for each in shown) else 0


def _show(console: Console, shown: Sequence[_Shown], interval: float) -> None:
    """Until Ctrl-C."""
    for each in shown:
        each.source.wait(min(interval, 1.0))
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(Group(*(each.render() for each in shown)), refresh=True)
                time.sleep(min(interval, 1.0))
    except KeyboardInterrupt:
        pass
    console.print(Group(*(each.render() for each in shown)))


def _shown(target: str) -> _Shown:
    if is_address(target):
        url = address_of(target)
        history = EngineHistory()
        engine = Source(target, lambda: scrape(url), history.take)
        return _Shown(engine, lambda: show_engine(engine, history))
    folders = Source(target, folders_of(target), lambda _: None)
    return _Shown(folders, lambda: show_directory(folders))


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _LEAST_SECONDS <= value <= _MOST_SECONDS:
        raise ConfigError(
            f"--interval is {text!r} on the command line; allowed: seconds from "
            f"{_LEAST_SECONDS:g} to {_MOST_SECONDS:g}"
        )
    return value
