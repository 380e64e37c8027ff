# SPDX-License-Identifier: Apache-2.0
"""Show live what FlexKV does: hit rates, saved prefill time, links, room, failures. TARGET is an
engine's address, as http://HOST:PORT, the directory of a `flexkv serve`, or a cache directory;
several are shown one below the other.
An engine may go away and come back; a drive may hang. Press q or Ctrl-C to end the command. Without
a terminal, or with --once, the figures are printed once. Exit code 0, or 1 if a target gave no
figures in the end."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from flexkv.cli.common import Command, number
from flexkv.cli.top_metrics import Reading
from flexkv.cli.top_sources import Source, read_folders, readers_of
from flexkv.cli.top_view import EngineHistory, show_directory, show_engine
from flexkv.tiers.disk.inspect import FolderState
from flexkv.types.errors import ConfigError

_INTERVAL_SECONDS = 2.0
_LEAST_SECONDS, _MOST_SECONDS = 0.2, 3600.0
_FIRST_SECONDS = 8.0
"""Time limit of `--once` for the first answers. An engine may take 5 s; see `top_sources`."""
_REFRESH_SECONDS = 1.0
"""Longest time between two drawings of the view, also while targets do not answer."""
_HINT = Text("q: quit", style="dim")
_QUIT = b"qQ"
_MOST_TARGETS = 16
_PIPE_COLUMNS = 120
"""Width of the output if it is no terminal: all columns of the tables have room."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A target and its figures."""

    source: Source[Reading] | Source[Sequence[FolderState]]
    render: Callable[[], RenderableType]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        metavar="TARGET",
        nargs="+",
        help="an engine's address, or the directory of a service or a cache",
    )
    parser.add_argument("--once", action="store_true", help="print the figures once")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        default=_INTERVAL_SECONDS,
        type=number("--interval", _LEAST_SECONDS, _MOST_SECONDS),
        help=f"seconds between two looks at a target; default: {_INTERVAL_SECONDS:g}",
    )


def _run(args: argparse.Namespace) -> int:
    """Ctrl-C ends the live view as q does, without a KeyboardInterrupt."""
    interval: float = args.interval
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
    shown = [_shown(target, read) for target, read in readers_of(targets).items()]
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_COLUMNS)
    with contextlib.ExitStack() as sources:
        for each in shown:
            each.source.start(interval)
            sources.callback(each.source.close)
        if args.once or not console.is_terminal:
            _wait(shown, _FIRST_SECONDS)
            console.print(Group(*(each.render() for each in shown)))
        else:
            _show(console, shown, interval)
    return 0 if all(each.source.gives_figures for each in shown) else 1


def _show(console: Console, shown: Sequence[_Shown], interval: float) -> None:
    """Show the live view until q or Ctrl-C, then print its last state."""
    with contextlib.suppress(KeyboardInterrupt):
        _wait(shown, _REFRESH_SECONDS)
        with Live(console=console, screen=True, auto_refresh=False) as live, _open_keys() as fd:
            ended = False
            while not ended:
                live.update(Group(*(each.render() for each in shown), _HINT), refresh=True)
                ended = _quit_within(fd, min(interval, _REFRESH_SECONDS))
    console.print(Group(*(each.render() for each in shown)))


@contextlib.contextmanager
def _open_keys() -> Iterator[int | None]:
    """The descriptor of the terminal of standard input, whose keys come without Enter and without
    an echo until the context ends; None if it is no terminal."""
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        yield None
        return
    modes = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, modes)


def _quit_within(fd: int | None, seconds: float) -> bool:
    """Whether the user presses the key q within `seconds`; waits for it."""
    deadline = time.monotonic() + seconds
    while fd is not None:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([fd], [], [], left)[0]:
            return False
        keys = b""
        with contextlib.suppress(OSError):
            keys = os.read(fd, 64)
        if not keys:  # the terminal is gone
            break
        if any(key in _QUIT for key in keys):
            return True
    time.sleep(max(0.0, deadline - time.monotonic()))
    return False


def _wait(shown: Sequence[_Shown], seconds: float) -> None:
    """Wait until each target has been asked once, for at most `seconds` seconds together."""
    deadline = time.monotonic() + seconds
    for each in shown:
        each.source.wait(max(0.0, deadline - time.monotonic()))


def _shown(target: str, read: Callable[[], Reading] | None) -> _Shown:
    if read is None:
        folders = Source(target, functools.partial(read_folders, target))
        return _Shown(folders, lambda: show_directory(folders))
    history = EngineHistory()
    engine = Source(target, lambda: history.take(read()))
    return _Shown(engine, lambda: show_engine(engine, history))


COMMAND = Command(
    "top", "show live what engines and cache directories do", __doc__, _add_arguments, _run
)
