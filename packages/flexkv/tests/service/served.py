# SPDX-License-Identifier: Apache-2.0
"""A service in this process, and schedulers that use it without an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flexkv.client import Transfer
from flexkv.host.arena import ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.service.attach import Attached, open_pool
from flexkv.service.attached import AttachedEngine
from flexkv.service.pool import SharedPool
from flexkv.service.pool_sizes import PoolFile
from flexkv.service.served_cache import ServedCache
from flexkv.service.server import NodeServer
from flexkv.session.wire import SessionInfo
from flexkv.settings import CacheConfig
from flexkv.types.mover import Direction, Status
from flexkv.types.tenants import tenant_number
from packages.conftest import PATIENCE_SECONDS
from packages.inside import awaits_service, go_on, index_of, line_of, stores_of

FORMAT = BlockFormat(1, (4096,))
ABOUT = SessionInfo("same", ArenaSpec(FORMAT, 0), True, ("model: toy",))
OTHER = SessionInfo("other", ArenaSpec(FORMAT, 0))

WORKER = """
import os
import sys
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.service.attach import join_pool
from flexkv.session.wire import ServiceTicket
from packages.flexkv.tests.service.served import FORMAT
root, client, token, path = sys.argv[1:]
arena = Arena(os.open(path, os.O_RDWR), ArenaSpec(FORMAT, 32, 64, int(client)))
membership = join_pool(ServiceTicket(root, int(client), token, "toy", "toy"), arena)
print("joined", flush=True)
sys.stdin.read()
"""

ENGINE = """
import os
import sys
from packages.flexkv.tests.service.served import Scheduler, keys_of
one = Scheduler(sys.argv[1])
one.store(keys_of("a", 3))
held = one.cache.load(keys_of("a", 3))
transfer = one.cache.store(keys_of("b", 3), range(3))
path = f"/proc/{os.getpid()}/fd/{one.arena.fd}"
print(one.ticket.client, one.ticket.token, path, flush=True)
sys.stdin.read()
"""
"""Programs of a rank and of a scheduler with a rank, as processes of their own."""


def raising(*_: object) -> NoReturn:
    raise RuntimeError("on purpose")


def until(condition: Callable[[], object], act: Callable[[], object] = lambda: None) -> None:
    """Wait for what the service does."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "what is waited for does not happen"
        act()
        time.sleep(0.0005)


def keys_of(name: str, count: int, start: int = 0) -> list[bytes]:
    """Keys of a prompt's blocks."""
    return [f"{name} {number}".encode() for number in range(start, start + count)]


class Service:
    """A service in a thread, with memory for so many blocks.

    Attributes:
        root: path of its directory.
        config: settings of each server.
        pools: the sizes of pools of the next server.
        server: the server.
    """

    def __init__(
        self, folder: Path, slots: int = 32, slot_bytes: int = FORMAT.slot_bytes, **settings: Any
    ) -> None:
        self.root = str(folder / "service")
        settings.setdefault("cpu_cache_gb", slots * slot_bytes / (1 << 30))
        self.config = CacheConfig(runtime_dir=str(folder / "runtime"), **settings)
        self.pools: PoolFile | None = None
        self.start()

    def start(self) -> None:
        """Begin to serve, or to serve on in another server."""
        self.server = NodeServer(self.root, self.config, pools=self.pools)
        self._run()

    def _run(self) -> None:
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    @property
    def pool(self) -> SharedPool:
        """The only pool."""
        (pool,) = self.server.pools
        return pool

    @property
    def engine(self) -> AttachedEngine:
        """The only engine."""
        (engine,) = self.server.engines
        return engine

    @property
    def is_serving(self) -> bool:
        """Whether its loop runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the loop, as if the service hung."""
        self.server.stop()
        self._thread.join()

    def wake(self) -> None:
        """Go on after `stop`."""
        go_on(self.server)
        self._run()

    def close(self, flush_seconds: float = 0.0) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self.stop()
        self.server.close(flush_seconds)

    def evicted(self, *_: object) -> int:
        """Blocks that have left the memory for others."""
        return self.pool.cache.counters.evicted_blocks

    def accounted(self) -> bool:
        """Whether each slot is free, has a ready block, or is granted."""
        index = index_of(self.pool.cache)
        index.look_at_holds()
        granted = sum(engine.granted for engine in self.server.engines)
        return index.free_slots + len(index) + granted == index.num_slots


class Scheduler:
    """A scheduler with one rank, whose copies write the key of each block to its slot.

    Attributes:
        cache: the cache under test.
        info: the description of the session.
    """

    def __init__(
        self,
        root: str,
        *,
        step_blocks: int = 16,
        about: SessionInfo = ABOUT,
        model: str = "toy",
        tenant: str = "",
    ) -> None:
        self._shared = open_pool(root, model, "toy", about)
        self.arena = self._shared.arena
        assert self._shared.info.service is not None
        self.ticket = self._shared.info.service
        self.info = self._shared.info
        self.cache = ServedCache(
            Attached(self.info, step_blocks, self.arena, tenant_number(tenant)), self.arena
        )
        until(lambda: stores_of(self.cache).free, self.cache.poll)

    def copy(self, transfer: Transfer, status: Status = Status.DONE) -> None:
        """As the rank: write or check the bytes of each block, and report."""
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            view = self.arena.slot_view(slot)
            if transfer.direction is Direction.STORE:
                view[: len(key)] = key
            else:
                assert bytes(view[: len(key)]) == key
            view.release()
        self.arena.board.report(transfer.cell, 0, status)

    def store(self, keys: Sequence[bytes], tenant: str | None = None) -> list[bytes]:
        """Store a prompt, as far as there are slots. Returns the keys of the stored blocks."""
        tenants = None if tenant is None else [tenant_number(tenant)] * len(keys)
        transfer = self.cache.store(keys, range(len(keys)), tenants=tenants)
        if transfer is None:
            self.cache.poll()  # slots may have been granted since the last one
            return []
        self.copy(transfer)
        self.settle()
        return list(transfer.keys)

    def fill(self, name: str, count: int) -> None:
        """Store prompts of one block, each as soon as a slot is granted for it."""
        for number in range(count):
            key = keys_of(name, 1, number)
            until(lambda key=key: self.store(key), self.cache.poll)  # type: ignore[misc]

    def load(self, keys: Sequence[bytes]) -> bool:
        """Load blocks, and check their bytes."""
        transfer = self.cache.load(keys)
        if transfer is None:
            return False
        self.copy(transfer)
        self.settle()
        return True

    def settle(self) -> None:
        """Until the service has heard all."""
        until(lambda: not self.cache.busy and not awaits_service(self.cache), self.cache.poll)

    def settle_line(self) -> None:
        """Until the service has what was sent."""
        until(lambda: not line_of(self.cache).busy, self.cache.poll)

    def close(self) -> None:
        """Leave the service. Idempotent."""
        self.cache.close()
        self.arena.close()
        if self._shared.membership is not None:
            self._shared.membership.close()


def attached_again(service: Service, *engines: Scheduler) -> bool:
    """Whether these engines are served, and know it, and have free slots, after a poll of each."""
    for each in engines:
        each.cache.touch(keys_of("x", 1))
        each.cache.poll()
    served = {each.number for each in service.server.engines if each.is_served}
    return served >= {each.ticket.client for each in engines} and all(
        stores_of(each.cache).free and not line_of(each.cache).is_cut for each in engines
    )
