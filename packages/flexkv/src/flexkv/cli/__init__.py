# SPDX-License-Identifier: Apache-2.0
"""The command `flexkv`. `COMMANDS` is the table of its commands.

Exit codes: 0 for success, 2 for wrong usage, 130 after Ctrl-C. 1 and 3 mean that a command has
found something wrong, which its own description names; 1 also that the output could not be written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from flexkv.cli import clear, doctor, engine_commands, health, plan, serve, stat, top, verify
from flexkv.cli.common import Command
from flexkv.tiers.disk.files import reason_of
from flexkv.types.errors import FlexKVError
from flexkv.version import __version__

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

NO = 1
BAD_USE = 2
INTERRUPTED = 130
"""128 plus the number of SIGINT, as shells report it."""


COMMANDS: tuple[Command, ...] = (
    serve.COMMAND,
    stat.COMMAND,
    verify.COMMAND,
    clear.COMMAND,
    *engine_commands.COMMANDS,
    plan.COMMAND,
    top.COMMAND,
    health.COMMAND,
    doctor.COMMAND,
)


def run() -> NoReturn:
    """Run one command with the arguments of the process, and end the process with its exit code.

    The process ends by os._exit, without the shutdown of the interpreter. At a shutdown, a thread
    that waits for a hung drive or store could keep the process. A thread of obstore that frees an
    answer at that moment would abort it.
    """
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with these arguments, or those of the process, and return its exit code.
    Raises SystemExit if the arguments are not a command, or ask for help."""
    _open_standard_streams()
    name = "flexkv"
    try:
        args = _parse(argv)
        command: Command = args.command
        name = f"flexkv {command.name}"
        code = command.run(args)
        sys.stdout.flush()
    except FlexKVError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed it.
        _drop_output()
        return NO
    except OSError as error:
        _drop_output()
        what = "" if error.filename else "the output cannot be written: "
        print(f"{name}: error: {what}{reason_of(error)}", file=sys.stderr)
        return NO
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. Raises SystemExit if help, the version or wrong usage was printed, and
    OSError if the help or the version could not be printed."""
    try:
        return _parser().parse_args(argv)
    except SystemExit:
        sys.stdout.flush()
        raise


def _open_standard_streams() -> None:
    """Open the standard streams that the process was started without, and let standard output take
    any text.

    Without them, the first file that the process opens would become a standard stream. A command
    that prints without a standard output fails, as on a full disk. A path need not be UTF-8, and a
    terminal's encoding may lack a character: such text is printed as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        # `os.open` returns the lowest free descriptor; all below it are open by now.
        fd = os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
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


class _CommandParser(argparse.ArgumentParser):
    """A parser that does not swallow the error of a help that cannot be printed, and prints errors
    of FlexKV about the value of an option as commands do."""

    def parse_known_args(self, *args: Any, **more: Any) -> Any:
        try:
            return super().parse_known_args(*args, **more)
        except FlexKVError as error:
            self.exit(BAD_USE, f"{self.prog}: error: {error}\n")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        print(self.format_help(), end="", file=file)


class _Version(argparse.Action):
    """Prints the version, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"flexkv {__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _CommandParser(
        prog="flexkv", description="FlexKV keeps KV caches of LLM engines alive past GPU memory."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show program's version number and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, description=command.text)
        command.add_arguments(own)
        own.set_defaults(command=command)
    return parser
