# SPDX-License-Identifier: Apache-2.0
"""A service of one engine's own, in a process that ends with the process that started it.

The first process of the engine starts it, and the others find it. It ends if its starter closes it
or ends in any way, then writes waiting blocks for a while. If it ends otherwise, its starter starts
it again, and the engine hands the memory back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

from flexkv.service import messages as wire
from flexkv.service.pool_sizes import PoolFile, PoolSize
from flexkv.service.server import NodeServer
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.settings import SETTINGS, CacheConfig, configure_logging
from flexkv.types.errors import ArenaError, FlexKVError

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""Seconds for which lower tiers may write waiting blocks once the engine has ended."""

_START_SECONDS = 60.0
"""Seconds within which the process must listen: it imports Python modules, and takes no memory
yet."""
_END_SECONDS = FLUSH_SECONDS + 5.0
"""Seconds after which a process that was asked to end is killed."""

_AGAIN_SECONDS, _LONGEST_PAUSE = 0.5, 60.0
"""Pauses in seconds before a service that has ended starts again: twice as long each time, unless
it has lived for longer than the longest."""

_STARTS = "starts"
"""The file in the directory that is locked while a service starts."""
_READY = "ready"


class PrivateService:
    """A service that this process has started. A thread starts it again if it ends. `begin` starts
    the process, and may raise ArenaError and OSError."""

    def __init__(self, root: str, begin: Callable[[], subprocess.Popen[str]]) -> None:
        self._root = root
        self._begin = begin
        self._process = begin()
        self._guard = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._stay, name="flexkv-private-service", daemon=True).start()

    def close(self) -> None:
        """End the process, and wait for that. Idempotent."""
        self._closed.set()
        with self._guard:
            if self._process.poll() is not None:
                return
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning("the service in %r does not end, and is killed", self._root)
                self._process.kill()
                self._process.wait()

    def _stay(self) -> None:
        pause = _AGAIN_SECONDS
        while True:
            began = time.monotonic()
            code = self._process.wait()
            lived = time.monotonic() - began
            pause = _AGAIN_SECONDS if lived > _LONGEST_PAUSE else min(2 * pause, _LONGEST_PAUSE)
            if self._closed.wait(pause):
                return
            logger.error(
                "FlexKV's own service in %r has ended with exit code %d; it is started again",
                self._root,
                code,
            )
            with self._guard:
                if self._closed.is_set():
                    return
                try:
                    self._process = self._begin()
                except (ArenaError, OSError) as error:
                    logger.error("it does not start again yet: %s", error)


def start_private(
    root: str, config: CacheConfig, sizes: Mapping[str, PoolSize]
) -> PrivateService | None:
    """Start a service, unless one runs. The caller closes it; None if another process of the
    engine, which names the same directory, has started it. `sizes` are those of each pool, by the
    name of its model. Raises ArenaError if it did not start."""
    with (
        RuntimeDirectory(root, create=True) as directory,
        directory.locked(_STARTS, _START_SECONDS),
    ):
        try:
            directory.connect(wire.SOCKET, _START_SECONDS, socket.SOCK_SEQPACKET).close()
        except (FileNotFoundError, ConnectionRefusedError):
            return PrivateService(root, lambda: _start(root, config, sizes))
        except OSError as error:
            raise ArenaError(f"the service in {root!r} does not answer: {error}") from None
        return None


def _start(root: str, config: CacheConfig, sizes: Mapping[str, PoolSize]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, root, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # a Ctrl-C in the terminal ends the engine first
    )
    assert process.stdin is not None
    assert process.stdout is not None
    said = ""
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        json.dump([_written(config), {k: dataclasses.astuple(v) for k, v in sizes.items()}], stdin)
    with process.stdout as stdout:
        ready, _, _ = select.select([stdout], [], [], _START_SECONDS)
        said = stdout.readline().strip() if ready else f"it was silent for {_START_SECONDS:.0f} s"
    if said != _READY:
        process.kill()
        code = process.wait()
        raise ArenaError(f"FlexKV's own service did not start: {said or f'exit code {code}'}")
    return process


def _written(config: CacheConfig) -> dict[str, object]:
    """The settings that differ from their defaults, but for the sizes of pools and their shares."""
    values = {name: getattr(config, name) for name in SETTINGS}
    values |= {"tenant_shares": (), "service": None}
    return {name: value for name, value in values.items() if value != SETTINGS[name].default}


def main() -> int:
    """Serve until the starter ends. Its settings come from standard input; one line of standard
    output says that it listens, or why not."""
    root, starter = sys.argv[1], int(sys.argv[2])
    settings, sizes = json.load(sys.stdin)
    try:
        config = CacheConfig(**settings)
        configure_logging(config)
        named = {name: PoolSize(memory, disk) for name, (memory, disk, _) in sizes.items()}
        server = NodeServer(root, config, pools=PoolFile("", next(iter(named.values())), named))
    except FlexKVError as error:
        print(str(error).replace("\n", " "), flush=True)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    try:
        _end_with(starter, server)
        print(_READY, flush=True)
        sys.stdout.close()
        server.run()
    finally:
        server.close(FLUSH_SECONDS)
        shutil.rmtree(root, ignore_errors=True)
    return 0


def _end_with(starter: int, server: NodeServer) -> None:
    """Let the server stop when a process ends. Raises OSError if it has ended."""
    pidfd = os.pidfd_open(starter)
    if os.getppid() != starter:
        raise ProcessLookupError(f"process {starter} has ended")

    def wait() -> None:
        ends = select.poll()
        ends.register(pidfd, select.POLLIN)
        ends.poll()
        server.stop()

    threading.Thread(target=wait, name="flexkv-starter", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
