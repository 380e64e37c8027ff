# SPDX-License-Identifier: Apache-2.0
"""A process of a shared store, which tests stop, kill and start again."""

from __future__ import annotations

import abc
import signal
import subprocess
from typing import Self


class StoreProcess(abc.ABC):
    """Started at once. A context manager that ends it. Subclasses say how to start it."""

    def __init__(self) -> None:
        self._process = self._launch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it, also while it is paused. What it holds is lost."""
        self._process.kill()
        self._process.communicate()

    def restart(self) -> None:
        """After `kill`: start it again, without what it held."""
        self._process = self._launch()

    @abc.abstractmethod
    def _launch(self) -> subprocess.Popen[str]:
        """Start it and wait until it serves."""
