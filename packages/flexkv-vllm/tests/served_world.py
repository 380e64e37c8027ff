# SPDX-License-Identifier: Apache-2.0
"""Engines without a model that use one service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_world import World
from kv_pages import BLOCK_TOKENS, HEAD_BYTES, HEADS, LAYERS
from patience import wait_until

from packages.flexkv.tests.service.served import Service
from packages.inside import assert_served_rest, awaits_service, index_of, line_of, stores_of
from packages.tier_blocks import ready_blocks, writing_blocks

SLOT_BYTES = 4096 * -(-BLOCK_TOKENS * HEAD_BYTES * HEADS * LAYERS // 4096)

MakeService = Callable[..., Service]
"""The fixture `make_service`."""


def make_service(folder: Path, slots: int, **settings: Any) -> Service:
    """A service with memory for so many blocks of a world."""
    return Service(folder, slots, SLOT_BYTES, **settings)


def assert_nothing_is_lost(service: Service) -> None:
    """Once engines are at rest: each slot is free, has a block, or is granted."""
    wait_until(service.accounted, lambda: None)
    index = index_of(service.pool.cache)
    assert not writing_blocks(index)
    assert [block.key for block in ready_blocks(index).values() if block.leases] == []


class ServedWorld(World):
    """A world whose blocks are the service's."""

    def settle(self) -> None:
        """As in any world, and until the service has published what was stored, so that other
        engines find it, and has granted slots again."""
        super().settle()
        if self.is_on:
            wait_until(lambda: self._is_served, self.poll)

    @property
    def _is_served(self) -> bool:
        cache = self.cache
        return line_of(cache).is_cut or (not awaits_service(cache) and bool(stores_of(cache).free))

    def assert_at_rest(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        if not self.is_on:
            return
        self.settle()
        assert_served_rest(self.cache)
        self.assert_untracked()
