# SPDX-License-Identifier: Apache-2.0
"""Processes of engines, forked from one that has imported the engine; see ``forker``."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""An engine's processes each import thousands of files. Without bytecode from an earlier start they
compile all of them: for each process of SGLang 0.5.23, 22 s of processor time instead of 9 s."""

# Bytes of its log that an error shows.
_LOG_TAIL = 4000


class ForkedProcess:
    """A process whose parent is the fork server; as far as needed like ``subprocess.Popen``."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = os.fdopen(descriptor)

    def poll(self) -> int | None:
        """None while it lives, else 0: only the fork server knows its exit status."""
        return 0 if self._ended(timeout=0) else None

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor.fileno(), signal.SIGTERM)

    def wait(self) -> int:
        """Wait until it has ended."""
        self._ended(timeout=None)
        return 0

    def _ended(self, timeout: int | None) -> bool:
        ready = select.poll()
        ready.register(self._descriptor, select.POLLIN)
        return bool(ready.poll(timeout))


class ForkServer:
    """A process that has imported an engine and forks others; it ends with this process.

    Calls may come from several threads.

    Args:
        python: interpreter that has the engine.
        engine: module that prepares the process; see ``forker``.
        environment: the one in which the engine is imported.

    Attributes:
        environment: as given.
    """

    def __init__(self, python: Path, engine: str, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open until `close`)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [str(python), "-m", "integration.harness.forker", str(theirs.fileno()), engine],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the process that made it.
                process_group=0,
                env={**environment, **KEEP_BYTECODE},
            )
        atexit.register(self.close)

    def run(
        self,
        module: str,
        environment: Mapping[str, str],
        log_fd: int,
        arguments: Sequence[str] = (),
        passed: Sequence[int] = (),
    ) -> ForkedProcess:
        """Fork a process that does what ``python -m`` does, in a process group of its own.

        Args:
            module: that it runs.
            environment: of the process. Variables that the engine reads when it is imported must
                be those of the server.
            log_fd: descriptor that receives all that it prints.
            arguments: of its command line.
            passed: up to two descriptors; their numbers in the new process are its last arguments.

        The descriptors stay the caller's. Raises RuntimeError when the server has ended.
        """
        order = json.dumps(
            {"module": module, "arguments": [*arguments], "environment": dict(environment)}
        ).encode()
        with self._lock:
            try:
                socket.send_fds(self._control, [order], [log_fd, *passed])
                answer, processes, _, _ = socket.recv_fds(self._control, 64, 1)
            except (BrokenPipeError, ConnectionResetError):
                answer, processes = b"", []
        if not answer:
            status = self._process.wait()
            self._log.seek(-min(_LOG_TAIL, self._log.seek(0, os.SEEK_END)), os.SEEK_END)
            said = self._log.read().decode(errors="replace")
            raise RuntimeError(f"the fork server has ended (status {status}); its log:\n{said}")
        return ForkedProcess(int(answer), *processes)

    @property
    def pid(self) -> int:
        """Pid of the server, which is also the id of its process group."""
        return self._process.pid

    def close(self) -> None:
        """End the server. Drivers end with their command pipes; servers stay. Idempotent."""
        atexit.unregister(self.close)
        self._control.close()
        self._process.wait()
        self._log.close()
