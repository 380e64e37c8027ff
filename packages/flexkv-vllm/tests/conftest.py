# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from engine_world import MakeWorld, World
    from offloading_world import MakeOffloadingWorld, OffloadingWorld

# All of the adapter is written against vLLM's own classes: without them there is nothing to test.
pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Makes worlds over one directory, and closes them."""
    from engine_world import World

    worlds: list[World] = []

    def make(**options: Any) -> World:
        worlds.append(World(tmp_path, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def make_offloading_world(tmp_path: Path) -> Iterator[MakeOffloadingWorld]:
    """As `make_world`, under vLLM's OffloadingConnector."""
    from offloading_world import OffloadingWorld

    worlds: list[OffloadingWorld] = []

    def make(**options: Any) -> OffloadingWorld:
        worlds.append(OffloadingWorld(tmp_path, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
