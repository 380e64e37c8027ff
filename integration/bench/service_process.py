# SPDX-License-Identifier: Apache-2.0
"""`flexkv serve` as a process of the benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexkv.service.state import PoolState, state_of


class ServiceProcess:
    """The service, which may end and begin again.

    Args:
        folder: for its directories; exists.
        memory_gb: host memory of a pool, in GiB.
        disk_gb: of a pool, in GiB; 0 for no disk.

    Attributes:
        root: its directory.
    """

    def __init__(self, folder: Path, memory_gb: float, disk_gb: float = 0) -> None:
        self.root = str(folder / "service")
        self._environ = os.environ | {
            "FLEXKV_CPU_CACHE_GB": str(memory_gb),
            "FLEXKV_RUNTIME_DIR": str(folder / "runtime"),
        }
        if disk_gb:
            self._environ["FLEXKV_SSD_CACHE_DIR"] = str(folder / "disk")
            self._environ["FLEXKV_SSD_CACHE_GB"] = str(disk_gb)
        self.start()

    def start(self) -> None:
        """Returns once it listens."""
        command = [sys.executable, "-m", "flexkv", "serve", self.root]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self._environ
        )
        assert self._process.stdout is not None
        if "listens" not in self._process.stdout.readline():
            raise RuntimeError("the service does not start")

    def stop(self) -> None:
        """Let it hang."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """The opposite of `stop`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it. Idempotent."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def cpu_seconds(self) -> float:
        """Of all its threads."""
        text = Path(f"/proc/{self._process.pid}/stat").read_text()
        ticks = text.rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    @property
    def pool(self) -> PoolState:
        """Its only pool."""
        (pool,) = state_of(self.root).pools
        return pool


@contextmanager
def service_process(folder: Path, memory_gb: float, disk_gb: float = 0) -> Iterator[ServiceProcess]:
    """See `ServiceProcess`; it is killed in the end."""
    service = ServiceProcess(folder, memory_gb, disk_gb)
    try:
        yield service
    finally:
        service.kill()
