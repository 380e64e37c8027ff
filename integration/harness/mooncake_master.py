# SPDX-License-Identifier: Apache-2.0
"""A real mooncake_master on ports of its own, and the etcd that names one of several masters."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
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
        metadata: whether it has an HTTP metadata server. Without, nodes find each other.
        etcd: that names the one of several masters that serves; None for a master of its own.

    Attributes:
        settings: of FlexKV, what a node needs to join.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        command: Sequence[str] = (),
        segment_gb: float = 1 / 64,
        *,
        metadata: bool = True,
        etcd: Etcd | None = None,
    ) -> None:
        self._has_metadata = metadata
        self._etcd = etcd
        self._address = address
        is_ipv6 = ":" in address
        # Its HTTP servers have no IPv6.
        self._web = "127.0.0.1" if is_ipv6 else address
        self._command = list(command)
        # Until the end: nobody may take a port before the first start, or while it is killed.
        self._held = [hold_port() for _ in range(3)]
        self._ports = [each.getsockname()[1] for each in self._held]
        own = f"[{address}]:{self._ports[0]}" if is_ipv6 else f"{address}:{self._ports[0]}"
        server = f"http://{self._web}:{self._ports[1]}/metadata"
        self.settings: dict[str, Any] = {
            "mooncake_master": own if etcd is None else etcd.url,
            "mooncake_metadata": server if metadata else "P2PHANDSHAKE",
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
        awaited = set(self._ports)
        options = [f"--metrics_host={self._web}", f"--metrics_port={self._ports[2]}"]
        if self._has_metadata:
            options += ["--enable_http_metadata_server=true"]
            options += [f"--http_metadata_server_host={self._web}"]
            options += [f"--http_metadata_server_port={self._ports[1]}"]
        else:
            awaited.remove(self._ports[1])
        if self._etcd is not None:
            options += ["--enable_ha=true", f"--etcd_endpoints={self._etcd.address}"]
            awaited.remove(self._ports[0])  # only one of them listens
        process = subprocess.Popen(
            [
                *self._command,
                str(Path(spec.origin).parent / "mooncake_master"),
                f"--rpc_address={self._address}",
                f"--rpc_port={self._ports[0]}",
                *options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for port in awaited:
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


class Etcd(StoreProcess):
    """See `StoreProcess`. Needs the program `etcd`.

    Attributes:
        address: that it listens on.
        url: the masters that it names, with a server that does not answer in front.
    """

    def __init__(self) -> None:
        self._held = [hold_port() for _ in range(3)]
        client, peer, silent = (each.getsockname()[1] for each in self._held)
        self.address = f"127.0.0.1:{client}"
        self.url = f"etcd://127.0.0.1:{silent};{self.address}"
        self._peer = f"http://127.0.0.1:{peer}"
        self._folder = tempfile.TemporaryDirectory()
        super().__init__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._folder.cleanup()
        for each in self._held:
            each.close()

    def _launch(self) -> subprocess.Popen[str]:
        program = shutil.which("etcd")
        assert program is not None
        client = f"http://{self.address}"
        process = subprocess.Popen(
            [
                *(program, "--data-dir", self._folder.name, "--unsafe-no-fsync"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer),
                *("--initial-cluster", f"default={self._peer}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while not self._serves(client):
            assert process.poll() is None
            time.sleep(0.02)
        return process

    def _serves(self, url: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:
            return bool(answer.status == http.client.OK)
        return False
