# SPDX-License-Identifier: Apache-2.0
"""Drivers of engines, forked from a process that has imported vLLM; see ``forker``."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping

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

    def wait(self) -> int:
        """Wait until it has ended."""
        self._ended(timeout=None)
        return 0

    def _ended(self, timeout: int | None) -> bool:
        ready = select.poll()
        ready.register(self._descriptor, select.POLLIN)
        return bool(ready.poll(timeout))


class ForkServer:
    """A process that has imported vLLM and forks drivers; it ends with the process that made it.

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
                start_new_session=True,
                env=environment,
            )

    def fork(
        self, environment: Mapping[str, str], command_fd: int, event_fd: int, log_fd: int
    ) -> ForkedProcess:
        """Fork a driver with that environment, two pipes and a log, in a session of its own.

        The descriptors stay the caller's. Raises RuntimeError when the server has ended.
        """
        order = json.dumps(dict(environment)).encode()
        with self._lock:
            try:
                socket.send_fds(self._control, [order], [command_fd, event_fd, log_fd])
                answer, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
            except (BrokenPipeError, ConnectionResetError):
                answer, descriptors = b"", []
        if not answer:
            status = self._process.wait()
            self._log.seek(-min(_LOG_TAIL, self._log.seek(0, os.SEEK_END)), os.SEEK_END)
            said = self._log.read().decode(errors="replace")
            raise RuntimeError(f"the fork server has ended (status {status}); its log:\n{said}")
        return ForkedProcess(int(answer), *descriptors)

    @property
    def pid(self) -> int:
        """Pid of the server, which is also the id of its session."""
        return self._process.pid

    def close(self) -> None:
        """End the server; drivers end with their command pipes."""
        self._control.close()
        self._process.wait()
        self._log.close()


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process, started when it is first needed."""
    server = ForkServer(forked_environment())
    atexit.register(server.close)
    return server
