# SPDX-License-Identifier: Apache-2.0
"""The command `flexkv`. Each command is a module here that is listed in `COMMANDS`.

Exit codes: 0 for yes, 1 for no (bad blocks were found, a folder was left), 2 for bad use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from flexkv import __version__
from flexkv.cli import clear, stat, verify
from flexkv.errors import FlexKVError

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
        # Who read the output has enough. What is left in the buffer must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


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
