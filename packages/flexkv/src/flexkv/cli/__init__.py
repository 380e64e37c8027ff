# SPDX-License-Identifier: Apache-2.0
"""The command `flexkv`. `COMMANDS` lists the modules here, one for each command.

Exit codes: 0 for success, 2 for wrong usage. 1 means that bad blocks were found, a folder was
skipped or could not be read, or the output could not be written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from flexkv.cli import clear, doctor, plan, stat, top, verify
from flexkv.errors import FlexKVError
from flexkv.tiers.disk.files import reason_of
from flexkv.version import __version__

NO = 1
BAD_USE = 2
INTERRUPTED = 130


class Command(Protocol):
    """A module with one command."""

    NAME: str
    HELP: str
    """One line; `--help` of the command prints the module's docstring."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the command; returns the exit code.

        Raises:
            FlexKVError: wrong usage.
        """
        ...


COMMANDS: tuple[Command, ...] = (stat, verify, clear, plan, top, doctor)


def run() -> NoReturn:
    """Be the process of the command.

    It ends without ending the interpreter. A drive or a store that hangs would keep the process
    with a thread of it, and a thread of obstore that lets go of an answer while the interpreter
    ends aborts it.
    """
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments; if None, those of the process.

    Raises:
        SystemExit: the arguments are not a command, or ask for help.
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
        # The reader of the output has closed it.
        _drop_output()
        return NO
    except OSError as error:
        _drop_output()
        print(f"flexkv {command.NAME}: error: {reason_of(error)}", file=sys.stderr)
        return NO
    return code


def _open_standard_streams() -> None:
    """Open the standard streams that the process was started without.

    Without them, the first file that the process opens would become a standard stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        # `os.open` returns the lowest free descriptor; all below it are open by now.
        fd = os.open(os.devnull, os.O_RDWR)
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
        mode = "w" if number else "r"
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _drop_output() -> None:
    """Discard the buffer of standard output, so that flushing it at exit cannot fail."""
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
