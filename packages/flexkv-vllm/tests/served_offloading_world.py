# SPDX-License-Identifier: Apache-2.0
"""Engines without a model that use one service under vLLM's `OffloadingConnector`."""

from __future__ import annotations

from offloading_world import OffloadingWorld
from served_world import ServedWorld


class ServedOffloadingWorld(ServedWorld, OffloadingWorld):
    """An offloading world whose blocks are the service's."""
