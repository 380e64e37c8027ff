# SPDX-License-Identifier: Apache-2.0
"""Engines without a model that use one service."""

from __future__ import annotations

from engine_world import World

from packages.inside import assert_served_rest


class ServedWorld(World):
    """A world whose blocks are the service's."""

    def assert_at_rest(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        if not self.is_on:
            return
        self.settle()
        assert_served_rest(self.cache)
        self.assert_untracked()
