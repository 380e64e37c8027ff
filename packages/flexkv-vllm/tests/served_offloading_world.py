# SPDX-License-Identifier: Apache-2.0
"""Engines without a model that use one service under vLLM's `OffloadingConnector`."""

from __future__ import annotations

from typing import Any

from offloading_world import OffloadingWorld
from served_world import ServedWorld

from packages.inside import shared_of


class ServedOffloadingWorld(ServedWorld, OffloadingWorld):
    """An offloading world whose blocks are the service's."""

    @property
    def cache(self) -> Any:
        return shared_of(super().cache)

    def assert_untracked(self) -> None:
        super().assert_untracked()
        assert len(self.side.hits) == 0
