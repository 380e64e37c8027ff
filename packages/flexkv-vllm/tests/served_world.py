# SPDX-License-Identifier: Apache-2.0
"""Engines without a model that use one service."""

from __future__ import annotations

from engine_world import World

from flexkv.host.board import CELLS
from packages.inside import free_cells


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
