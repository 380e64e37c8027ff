# SPDX-License-Identifier: Apache-2.0
"""The command `flexkv`. Each command is a module here that is listed in `COMMANDS`.

Exit codes: 0 for yes, 1 for no (bad blocks were found, a folder was left or could not be read, the
output could not be written), 2 for bad use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from flexkv.cli import clear, stat, verify
from flexkv.errors import FlexKVError
from flexkv.tiers.disk.files import reason_of
from flexkv.version import __version__

NO = 1
BAD_USE = 2
INTERRUPTED = 130


class Command(Protocol):
    """A module with one command. What only this one needs it imports when it runs."""

    NAME: str
    HELP: str
    """One line; the module's docstring is shown by `--help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit code.

        Raises:
            FlexKVError: bad use.
        """
        ...


COMMANDS: tuple[Command, ...] = (stat, verify, clear)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` is that of the process if None. Returns its exit code.

    Raises:
        SystemExit: the arguments make no command, or ask for help.
    """
    _open_standard_streams()
    args = _parser().parse_args(argv)
    command: Command = args.command
    try:
        code = command.run(args)
        sys.stdout.flush()
    except FlexKVError as error:
        print(f"flexkv {command.NAME}: error: {error}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who read the output has enough.
        _drop_output()
        return NO
    except OSError as error:
        _drop_output()
        print(f"flexkv {command.NAME}: error: {reason_of(error)}", file=sys.stderr)
        return NO
    return code


def _open_standard_streams() -> None:
    """Give the process the standard streams that it was started without, so that no file which it
    opens becomes one of them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        # The lowest descriptor that is free: those below are open by now.
        fd = os.open(os.devnull, os.O_RDWR)
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
        mode = "w" if number else "r"
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _drop_output() -> None:
    """What is left in the buffer of standard output must not fail at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexkv", description="FlexKV keeps KV caches of LLM engines alive past GPU memory."
    )
    parser.add_argument("--version", action="version", version=f"flexkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.NAME, help=command.HELP, description=command.__doc__)
        command.add_arguments(own)
        own.set_defaults(command=command)
    return parser
