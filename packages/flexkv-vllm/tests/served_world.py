# SPDX-License-Identifier: Apache-2.0
"""Engines without a model that use one service, which runs in a thread or in a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_world import World
from patience import wait_until

from flexkv.host.board import CELLS
from flexkv.service.attached import AttachedEngine
from flexkv.service.pool import SharedPool
from flexkv.service.server import NodeServer
from flexkv.settings import CacheConfig
from packages.inside import free_cells
from packages.tier_blocks import ready_blocks, writing_blocks


class ServedWorld(World):
    """A world whose blocks are the service's."""

    def assert_at_rest(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        if not self.is_on:
            return
        self.settle()
        cache = self.cache
        assert sorted(free_cells(cache._device._board)) == list(range(CELLS))
        assert cache._reader.held == 0
        assert not cache._stores.by_id
        assert not cache._stores.by_key
        assert not cache._fetches
        assert sorted(cache._stores.free) == sorted(cache._stores.granted)
        self.assert_untracked()


class Service:
    """The service of a test, in a thread.

    Attributes:
        server: the server.
        root: path of its directory.
    """

    def __init__(self, root: Path, gb: float, **settings: Any) -> None:
        self.root = str(root)
        config = CacheConfig(runtime_dir=str(root.parent / "runtime"), **settings)
        self.server = NodeServer(self.root, config, gb)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    @property
    def pool(self) -> SharedPool:
        """The only pool."""
        (pool,) = self.server.pools
        return pool

    @property
    def engines(self) -> list[AttachedEngine]:
        """The attached engines."""
        return list(self.server.engines)

    def assert_no_slot_is_lost(self) -> None:
        """Once engines are at rest: each slot is free, has a block, or is granted."""
        index = self.pool.cache._index
        granted = sum(engine.granted for engine in self.engines)

        def accounted() -> bool:
            index.look_at_holds()
            return index.free_slots + len(index) + granted == index.num_slots

        wait_until(accounted, lambda: None)
        assert not writing_blocks(index)
        assert [b.key for b in ready_blocks(index).values() if b.leases] == []

    def stop(self) -> None:
        """End the loop; the thread is gone then."""
        self.server.stop()
        self._thread.join()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self.stop()
        self.server.close(0)


@contextlib.contextmanager
def service_process(root: Path, gb: float, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """The service as users start it."""
    environ = dict(
        os.environ,
        FLEXKV_CPU_CACHE_GB=f"{gb:.12f}",
        FLEXKV_RUNTIME_DIR=str(root.parent / "runtime"),
        **settings,
    )
    command = [sys.executable, "-m", "flexkv", "serve", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            assert "listens" in process.stdout.readline()
            yield process
        finally:
            process.kill()
