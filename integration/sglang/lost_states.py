# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang that loses recurrent states on demand: tests must notice that."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Literal

from integration.campaign import plugin
from integration.sglang import environment

Part = Literal["conv", "temporal"]
"""Of a state: the last inputs of the convolutions, and the recurrent state."""


def install(folder: Path) -> dict[str, str]:
    """Make the plugin known; returns what to add to a server's environment."""
    orders = folder / "lost"
    orders.mkdir(parents=True)
    path = environment.python_path()
    return plugin.install(folder / "plugin", orders, path, plugin.SGLANG, __name__)


def lose(folder: Path, part: Part, lost: bool = True) -> None:
    """Have the server of this folder zero this part of each state that it copies, or no more."""
    order = folder / "lost" / part
    if lost:
        order.touch()
    else:
        order.unlink()


def register() -> None:
    """Zero copies of states, such as the copy that a request gets from the prefix cache."""
    pool: Any = importlib.import_module("sglang.srt.mem_cache.memory_pool").MambaPool
    copy = pool.copy_from
    orders = Path(os.environ[plugin.FOLDER])
    if getattr(copy, "loses", False):
        return

    def copy_or_lose(states: Any, source: Any, target: Any) -> None:
        copy(states, source, target)
        cache = states.mamba_cache
        parts = {"conv": cache.conv, "temporal": [cache.temporal]}
        for part, tensors in parts.items():
            if (orders / part).exists():
                for tensor in tensors:
                    tensor[:, target] = 0

    copy_or_lose.loses = True  # type: ignore[attr-defined]
    pool.copy_from = copy_or_lose
