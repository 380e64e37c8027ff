# SPDX-License-Identifier: Apache-2.0
"""Engines without a model that use one service under vLLM's `OffloadingConnector`."""

from __future__ import annotations

from typing import Any

from offloading_world import OffloadingWorld
from patience import wait_until

from packages.inside import assert_served_rest, awaits_service, shared_of


class ServedOffloadingWorld(OffloadingWorld):
    """An offloading world whose blocks are the service's."""

    @property
    def cache(self) -> Any:
        return shared_of(super().cache)

    def assert_at_rest(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        if not self.is_on:
            return
        self.settle()
        wait_until(lambda: not awaits_service(self.cache), self.cache.poll)
        assert len(self.side.hits) == 0
        assert_served_rest(self.cache)
        self.assert_untracked()
