# SPDX-License-Identifier: Apache-2.0
"""Asks the engine of a world as operators do."""

from __future__ import annotations

from typing import Any

from asked_door import call_door
from engine_world import World


def call_engine(world: World, path: str, **question: Any) -> Any:
    """The answer of the engine's door."""
    root = world.vllm_config.kv_transfer_config.get_from_extra_config("runtime_dir", "")
    return call_door(root, path, **question)
