# SPDX-License-Identifier: Apache-2.0
"""The process of a router: start, wait, end."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from integration.harness.ports import hold_port

START_SECONDS = 60.0


class RouterProcess:
    """A router; a context manager that ends it.

    Args:
        command: its command line, but for its addresses.
        log: receives what it prints.
    """

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self._log = log
        self._ending = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            ports = [self._ending.enter_context(hold_port()).getsockname()[1] for _ in range(2)]
            self._url = f"http://127.0.0.1:{ports[0]}"
            output = self._ending.enter_context(log.open("w"))
            addresses = ["--host", "127.0.0.1", "--port", str(ports[0])]
            process = subprocess.Popen(
                [*command, *addresses, "--prometheus-port", str(ports[1])],
                stdout=output,
                stderr=output,
            )
            self._ending.callback(process.wait)
            self._ending.callback(process.kill)
            late = time.monotonic() + START_SECONDS
            while not self._serves():
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < late, log.read_text()[-4000:]
                time.sleep(0.1)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it. Idempotent."""
        self._ending.close()

    def _serves(self) -> bool:
        """Whether it takes requests."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health"):
            return True
        return False
