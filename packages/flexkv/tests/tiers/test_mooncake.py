# SPDX-License-Identifier: Apache-2.0
"""Blocks in a real Mooncake Store, called from several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip(
    "mooncake.store",
    reason="Mooncake Store is not installed: pip install 'flexkv[mooncake]', apt-get install "
    "libibverbs1 librdmacm1 libnuma1",
    exc_type=ImportError,
)

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from shared_node import FINGERPRINT, SLOT

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers.epochs import Epochs
from flexkv.tiers.job import Outcome
from flexkv.tiers.mooncake.store import MetadataRecord, MooncakeBlocks
from integration.harness.mooncake_master import MooncakeMaster
from packages.conftest import PATIENCE_SECONDS

THREADS = 4


class Slowly:
    """A client whose transfers wait until as many are under way as there may be.

    Attributes:
        most: transfers that were under way at once.
    """

    def __init__(self, client: Any, transfers: int) -> None:
        self._client = client
        self._transfers = transfers
        self._changed = threading.Condition()
        self._now = 0
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return self._counted(call) if name.endswith("_multi_buffers") else call

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            with self._changed:
                self._now += 1
                self.most = max(self.most, self._now)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.most >= self._transfers, PATIENCE_SECONDS)
            time.sleep(0.05)  # time for one too many to come
            result = call(*arguments)
            with self._changed:
                self._now -= 1
            return result

        return counted


@pytest.mark.parametrize("transfers", [1, 2])
def test_so_many_transfers_at_once(transfers: int) -> None:
    arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), THREADS), threads=1)
    views = [arena.slot_view(slot) for slot in range(THREADS)]
    for i, view in enumerate(views):
        view[:] = bytes([i]) * SLOT
    with MooncakeMaster() as master:
        url = master.settings["mooncake_metadata"]
        client = MooncakeDistributedStore()
        address = master.settings["mooncake_master"]
        assert client.setup("127.0.0.1", url, 1 << 24, 1 << 24, "tcp", "", address) == 0
        epochs = Epochs(MetadataRecord(url, FINGERPRINT, PATIENCE_SECONDS))
        epoch = epochs.open()
        slowly = Slowly(client, transfers)
        blocks = MooncakeBlocks(
            slowly,
            ReplicateConfig(),
            epochs,
            FINGERPRINT,
            slot_bytes=SLOT,
            blocks=THREADS,
            transfers=transfers,
        )
        blocks.register(arena.address + arena.spec.slots_offset, arena.spec.slots_bytes)

        def move(call: Callable[..., Any]) -> list[Outcome]:
            with ThreadPoolExecutor(THREADS) as pool:
                done = pool.map(
                    lambda i: call(epoch, [bytes([i]) * 32], [views[i]]), range(THREADS)
                )
                return [each[0] for each in done]

        assert move(blocks.put) == [Outcome.DONE] * THREADS
        for view in views:
            view[:] = bytes(SLOT)
        assert move(blocks.get) == [Outcome.DONE] * THREADS
        assert [bytes(view) for view in views] == [bytes([i]) * SLOT for i in range(THREADS)]
        assert slowly.most == transfers
        blocks.close()
