# SPDX-License-Identifier: Apache-2.0
"""Keeps at most one engine alive for the tests of one process, which share it."""

from __future__ import annotations

from pathlib import Path

from integration.harness.config import EngineConfig
from integration.harness.engine import Engine


class EngineHost:
    """Starts engines on demand; a new one only after the last one has ended.

    ``log_dir`` receives one log per start.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._engine: Engine | None = None
        self._starts = 0

    def get(self, config: EngineConfig) -> Engine:
        """The running engine if it has this config, else a new one."""
        engine = self._engine
        if engine is not None and engine.config == config and engine.alive:
            return engine
        return self.start(config)

    def start(self, config: EngineConfig) -> Engine:
        """A new engine in any case; raises EngineStartError."""
        self.close()
        self._starts += 1
        log = self._log_dir / f"engine-{self._starts:02d}-{config.connector.name}.log"
        self._engine = Engine(config, log)
        return self._engine

    def close(self) -> None:
        """End the running engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
