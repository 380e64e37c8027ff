# SPDX-License-Identifier: Apache-2.0
"""Starts of a real SGLang with FlexKV that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.system.available import total_memory
from integration.harness.answers import EngineError
from integration.harness.checkpoint import TINY
from integration.sglang.linker import linker_config
from integration.sglang.server import SglangServer


def test_what_fails_on_one_of_two_ranks_ends_the_start(
    tmp_path: Path, model: Path, sglang: Path
) -> None:
    """Rank 0 takes the memory. Whichever rank SGLang ends first, the log has the cause."""
    # All that the machine has: the checks before the start do not ask what others have of it.
    wanted = f"{total_memory() / 2**30 - 0.01:.2f}"
    settings = {
        "FLEXKV_CPU_CACHE_GB": wanted,
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
    }
    config = linker_config(model, TINY, settings, tensor_parallel_size=2, forked=True)
    with pytest.raises(EngineError):
        SglangServer(config, tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert "FlexKV cannot start on rank 0; no rank starts" in log
    assert f"ArenaError: cpu_cache_gb is {wanted} GiB" in log
