# SPDX-License-Identifier: Apache-2.0
"""A real mooncake_master with its HTTP metadata server, on ports of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any


class MooncakeMaster:
    """Started at once.

    Attributes:
        settings: what a node needs to join.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            self._ports = [each.getsockname()[1] for each in sockets]
        self.settings: dict[str, Any] = {
            "mooncake_master": f"127.0.0.1:{self._ports[0]}",
            "mooncake_metadata": f"http://127.0.0.1:{self._ports[1]}/metadata",
            "mooncake_segment_gb": 1 / 64,
        }
        self._process = self._launch()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """At the same address, without what it knew."""
        self._process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        process = subprocess.Popen(
            [
                str(Path(spec.origin).parent / "mooncake_master"),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self._ports[0]}",
                "--enable_http_metadata_server=true",
                "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={self._ports[1]}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self._ports[2]}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for port in self._ports:
            while True:
                assert process.poll() is None
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.02)
        return process
