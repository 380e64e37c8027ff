# SPDX-License-Identifier: Apache-2.0
"""The engines of a campaign. Sizes are such that blocks come, go and return all the time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from integration.campaign import plugin
from integration.campaign.prompts import Question, ask_for_answers, make_prompts
from integration.campaign.verdict import Sizes
from integration.harness import connector
from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.connector import NONE, Connector
from integration.harness.server import Server

POLICIES = ("recompute", "fail")
"""vLLM's: compute what was not loaded, or fail the request."""
ENGINE_BLOCK, BLOCK = 32, 64
BLOCK_BYTES = BLOCK * TINY.kv_bytes_per_token
ORDERS, DISK = "orders", "disk"
"""Folders in that of a campaign."""
_MODEL_TOKENS = 2048
_KV_TOKENS = 4 * _MODEL_TOKENS
"""Of vLLM's own cache: less than eight clients want at times, so that requests are preempted."""
_ARENA_SLOTS, _DISK_SLOTS = 90, 260
"""Of some 380 blocks that the prompts have: host memory holds a quarter, the disk two thirds."""


def reference(folder: Path, seed: int) -> list[Question]:
    """Prompts, and what an engine without FlexKV answers."""
    config = _config(folder, NONE, 1)
    with Server(config, folder / "reference.log", None) as server:
        return ask_for_answers(server, make_prompts(seed))


def campaign_config(folder: Path, own_folder: Path, policy: str, ranks: int) -> EngineConfig:
    """The engine that is put to the test: its checkpoint in `folder`, all else in `own_folder`."""
    settings: dict[str, Any] = {
        "cpu_cache_gb": _gigabytes(_ARENA_SLOTS),
        "block_tokens": BLOCK,
        "runtime_dir": str(own_folder / "run"),
        "ssd_cache_gb": _gigabytes(_DISK_SLOTS),
        "ssd_cache_dir": str(own_folder / DISK),
    }
    chosen = connector.plugin(recompute=policy == "recompute", **settings)
    config = _config(folder, chosen, ranks)
    path = config.environment()["PYTHONPATH"]
    return replace(config, env=plugin.install(own_folder / "plugin", own_folder / ORDERS, path))


def sizes(ranks: int) -> Sizes:
    """Of that engine."""
    return Sizes(
        engine_block_bytes=ENGINE_BLOCK * TINY.kv_bytes_per_token,
        block_bytes=BLOCK_BYTES,
        engine_block_tokens=ENGINE_BLOCK,
        longest_tokens=_MODEL_TOKENS,
        ranks=ranks,
    )


def _config(folder: Path, chosen: Connector, ranks: int) -> EngineConfig:
    return EngineConfig(
        model=write_checkpoint(TINY, folder),
        dtype=TINY.dtype,
        connector=chosen,
        max_model_len=_MODEL_TOKENS,
        max_num_batched_tokens=512,
        block_size=ENGINE_BLOCK,
        kv_cache_bytes=_KV_TOKENS * TINY.kv_bytes_per_token // ranks,
        tensor_parallel_size=ranks,
        prefix_caching=chosen is not NONE,
    )


def _gigabytes(slots: int) -> float:
    """A size in GiB with room for so many blocks, and for what is kept beside them."""
    return 1.01 * slots * BLOCK_BYTES / (1 << 30) + 1e-4
