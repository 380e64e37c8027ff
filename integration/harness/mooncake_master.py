# SPDX-License-Identifier: Apache-2.0
"""A real mooncake_master with its HTTP metadata server, on ports of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.harness.ports import hold_port
from integration.harness.store_process import StoreProcess

START_SECONDS = 60.0


class MooncakeMaster(StoreProcess):
    """See `StoreProcess`. It starts again at the same address.

    Args:
        address: that it listens on, and that nodes reach it at.
        command: what runs its command line, for instance `nsenter ...`.
        segment_gb: memory that each node lends, in GiB.

    Attributes:
        settings: of FlexKV, what a node needs to join.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        command: Sequence[str] = (),
        segment_gb: float = 1 / 64,
    ) -> None:
        self._address = address
        is_ipv6 = ":" in address
        # Its HTTP servers have no IPv6.
        self._web = "127.0.0.1" if is_ipv6 else address
        self._command = list(command)
        # Until the end: nobody may take a port before the first start, or while it is killed.
        self._held = [hold_port() for _ in range(3)]
        self._ports = [each.getsockname()[1] for each in self._held]
        self.settings: dict[str, Any] = {
            "mooncake_master": f"[{address}]:{self._ports[0]}"
            if is_ipv6
            else f"{address}:{self._ports[0]}",
            "mooncake_metadata": f"http://{self._web}:{self._ports[1]}/metadata",
            "mooncake_segment_gb": segment_gb,
        }
        super().__init__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for each in self._held:
            each.close()

    def metric(self, name: str) -> int:
        """A value that it reports for Prometheus, without the `master_` of its name. Only where
        this process reaches its address."""
        (found,) = [line for line in self._get("metrics") if line.startswith(f"master_{name} ")]
        return int(found.rpartition(" ")[2])

    def names(self) -> list[str]:
        """Of all objects. Only where this process reaches its address."""
        return self._get("get_all_keys")

    def _get(self, page: str) -> list[str]:
        """Lines of what it answers by HTTP."""
        url = f"http://{self._web}:{self._ports[2]}/{page}"
        with urllib.request.urlopen(url, timeout=START_SECONDS) as answer:
            text: bytes = answer.read()
        return text.decode().splitlines()

    def _launch(self) -> subprocess.Popen[str]:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        process = subprocess.Popen(
            [
                *self._command,
                str(Path(spec.origin).parent / "mooncake_master"),
                f"--rpc_address={self._address}",
                f"--rpc_port={self._ports[0]}",
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_host={self._web}",
                f"--http_metadata_server_port={self._ports[1]}",
                f"--metrics_host={self._web}",
                f"--metrics_port={self._ports[2]}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for port in self._ports:
            host = self._address if port == self._ports[0] else self._web
            self._await(process, host, port)
        return process

    def _await(self, process: subprocess.Popen[str], host: str, port: int) -> None:
        """Wait until it listens on `port`."""
        while not self._listens(host, port):
            assert process.poll() is None
            time.sleep(0.02)

    def _listens(self, host: str, port: int) -> bool:
        if self._command:  # only from where it runs
            connect = f"import socket; socket.create_connection(({host!r}, {port}))"
            tried = subprocess.run(
                [*self._command, sys.executable, "-c", connect], capture_output=True, check=False
            )
            return tried.returncode == 0
        with contextlib.suppress(OSError), socket.create_connection((host, port)):
            return True
        return False
