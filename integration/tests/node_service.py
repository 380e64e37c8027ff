# SPDX-License-Identifier: Apache-2.0
"""The service of a node, `flexkv serve`, beside real engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from integration.tests.disks import gigabytes

SLOTS = 600


class NodeService:
    """`flexkv serve` with memory for all that the tests store.

    Attributes:
        root: its directory.
        process: its process.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "service"
        self._environ = os.environ | {
            "FLEXKV_CPU_CACHE_GB": str(gigabytes(SLOTS)),
            "FLEXKV_RUNTIME_DIR": str(folder / "runtime"),
        }
        self.start()

    def start(self) -> None:
        """Returns once it listens."""
        command = [sys.executable, "-m", "flexkv", "serve", str(self.root)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self._environ
        )
        assert self.process.stdout is not None
        assert "listens" in self.process.stdout.readline()

    def kill(self) -> None:
        """Idempotent."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
