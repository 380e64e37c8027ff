# SPDX-License-Identifier: Apache-2.0
"""Processes of engines, forked from one that has imported vLLM; see ``forker``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from integration.harness.config import forked_environment

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
    """A process that has imported vLLM and forks others; it ends with the process that made it.

    ``environment`` is the one in which vLLM is imported. Calls may come from several threads.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open until `close`)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "integration.harness.forker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the process that made it.
                process_group=0,
                env=environment,
            )

    def fork_driver(
        self, environment: Mapping[str, str], log_fd: int, command_fd: int, event_fd: int
    ) -> ForkedProcess:
        """Fork a driver with that environment, a log and two pipes, in a process group of its own.

        The descriptors stay the caller's. Raises RuntimeError when the server has ended.
        """
        return self._fork(environment, None, [log_fd, command_fd, event_fd])

    def fork_server(
        self, environment: Mapping[str, str], log_fd: int, arguments: Sequence[str]
    ) -> ForkedProcess:
        """Fork vLLM's HTTP server with that environment, a log and these arguments of its command
        line, in a process group of its own. As ``fork_driver`` otherwise."""
        return self._fork(environment, arguments, [log_fd])

    def _fork(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str] | None,
        descriptors: Sequence[int],
    ) -> ForkedProcess:
        order = json.dumps({"environment": dict(environment), "arguments": arguments}).encode()
        with self._lock:
            try:
                socket.send_fds(self._control, [order], descriptors)
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
        """End the server. Drivers end with their command pipes; servers stay."""
        self._control.close()
        self._process.wait()
        self._log.close()


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process, started when it is first needed."""
    server = ForkServer(forked_environment())
    atexit.register(server.close)
    return server
