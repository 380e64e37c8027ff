# SPDX-License-Identifier: Apache-2.0
"""Three ways to run the command `flexkv`: in this process, in a fork of it, in a new Python.

A new Python takes half a second until its imports are done. A test takes one only if it needs what
the interpreter does at its start.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import IO, Any, NoReturn
from unittest import mock

from flexkv import cli
from packages.conftest import PATIENCE_SECONDS
from packages.flexkv.tests.cli.stores import Ended

Environ = Mapping[str, str]
Patch = Callable[[], AbstractContextManager[object]]
"""Enters changes of the code, for a command in a fork."""


def command_line(*arguments: object) -> list[str]:
    """The command in a new Python."""
    return [sys.executable, "-m", "flexkv", *map(str, arguments)]


def run(*arguments: object, environ: Environ | None = None, stdin: bytes = b"") -> Ended:
    """Run the command in this process; its streams are files.

    Args:
        arguments: of the command.
        environ: the whole environment; None for that of this process.
        stdin: the standard input.
    """
    with (
        _own_log(),
        _standard_streams(stdin) as outputs,
        mock.patch.dict(os.environ, dict(os.environ if environ is None else environ), clear=True),
    ):
        try:
            code = cli.main([*map(str, arguments)])
        except SystemExit as error:
            code = _code_of(error)
        return Ended(code, *map(_text_of, outputs))


class Fork:
    """The command in a fork of this process.

    As in a new process, nothing of this process is open there but the standard streams, Ctrl-C
    raises `KeyboardInterrupt`, and the command ends by `cli.run`. What this process has imported
    and patched is so there, too. Threads of libraries are not: a client of an object store that
    this process has used would hang.

    Attributes:
        pid: number of the process.
    """

    def __init__(
        self,
        *arguments: object,
        environ: Environ | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        closed: tuple[int, ...] = (),
        patch: Patch = contextlib.nullcontext,
        new_session: bool = False,
    ) -> None:
        """Start the command.

        Args:
            arguments: of the command.
            environ: the whole environment; None for that of this process.
            stdin: a descriptor; None for no input.
            stdout: a descriptor; None for a file that `end` returns.
            stderr: a descriptor; None for a file that `end` returns.
            closed: numbers of the standard streams that the command is started without.
            patch: entered before the command begins.
            new_session: let the command lead a session of its own.
        """
        self._files = [_memory_file("stdout"), _memory_file("stderr")]
        self._code: int | None = None
        null = os.open(os.devnull, os.O_RDONLY)
        given = (stdin, stdout, stderr)
        none = (null, *(file.fileno() for file in self._files))
        streams = [each if one is None else one for one, each in zip(given, none, strict=True)]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_command(
                [*map(str, arguments)],
                environ=environ,
                streams=streams,
                closed=closed,
                patch=patch,
                new_session=new_session,
            )
        os.close(null)

    def poll(self) -> int | None:
        """The exit code; None while the command runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the command, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        late = time.monotonic() + PATIENCE_SECONDS
        while (code := self.poll()) is None:
            assert time.monotonic() < late, "the command does not end"
            time.sleep(0.002)
        return code

    def end(self) -> Ended:
        """Wait for the end, and return what the command has printed."""
        try:
            code = self.wait()
        finally:
            self.kill()
        return Ended(code, *map(_text_of, self._files))


def _be_command(
    arguments: list[str],
    *,
    environ: Environ | None,
    streams: list[int],
    closed: tuple[int, ...],
    patch: Patch,
    new_session: bool,
) -> NoReturn:
    """Run the command in a process that was forked for it."""
    code = 1
    try:
        # No object of the tests may be collected here: it could close a file of the command.
        gc.freeze()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if new_session:
            os.setsid()
        _take_streams(streams, closed)
        if environ is not None:
            os.environ.clear()
            os.environ.update(environ)
        sys.argv = ["flexkv", *arguments]
        with patch():
            cli.run()
    except SystemExit as error:
        code = _code_of(error)
    except BaseException:  # noqa: BLE001 - as the interpreter reports it
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _take_streams(streams: list[int], closed: tuple[int, ...]) -> None:
    """Make `streams` the standard streams, close all other files, and open the streams as the
    interpreter does."""
    # Above all numbers in use, so that no stream overwrites another one.
    top = max(map(int, os.listdir("/proc/self/fd"))) + 1
    for number, fd in enumerate(streams):
        os.dup2(fd, top + number)
    for number in range(3):
        os.dup2(top + number, number)
    os.closerange(3, top + 3)
    for number in closed:
        os.close(number)
    opened: list[Any] = [None, None, None]
    for number, mode in enumerate("rww"):
        if number not in closed:
            opened[number] = os.fdopen(
                number,
                mode,
                encoding="utf-8",
                errors="backslashreplace" if number == 2 else "strict",
                buffering=1 if number == 2 or os.isatty(number) else -1,
                closefd=False,
            )
    sys.stdin, sys.stdout, sys.stderr = opened


@contextlib.contextmanager
def _own_log() -> Iterator[None]:
    """Undo what a command does to the logger, whose new handler writes to the command's errors."""
    log = logging.getLogger("flexkv")
    level, handlers, propagate = log.level, [*log.handlers], log.propagate
    log.handlers = []
    try:
        yield
    finally:
        log.setLevel(level)
        log.handlers, log.propagate = handlers, propagate


@contextlib.contextmanager
def _standard_streams(stdin: bytes) -> Iterator[list[IO[bytes]]]:
    """Replace the standard streams of this process by files; gives those of output and errors."""
    files = [_memory_file(name) for name in ("stdin", "stdout", "stderr")]
    files[0].write(stdin)
    files[0].seek(0)
    first = sys.stdin, sys.stdout, sys.stderr
    names = [file.fileno() for file in files]
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(name, mode, encoding="utf-8", closefd=False)
        for name, mode in zip(names, "rww", strict=True)
    )
    try:
        yield files[1:]
    finally:
        sys.stdin, sys.stdout, sys.stderr = first
        files[0].close()


def _memory_file(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "r+b", buffering=0)


def _text_of(file: IO[bytes]) -> str:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    file.seek(0)
    with file:
        text = file.read().decode()
    assert "Traceback" not in text, text
    return text


def _code_of(error: SystemExit) -> int:
    return error.code if isinstance(error.code, int) else int(error.code is not None)
