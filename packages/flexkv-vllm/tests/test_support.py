# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from world_config import PLUGIN, make_config

from flexkv import LayoutError
from flexkv_vllm.support import check_parallelism


@pytest.mark.parametrize(
    ("launcher", "ranks", "served"),
    [
        ("external_launcher", 2, False),
        ("external_launcher", 1, True),
        ("mp", 2, True),
        ("ray", 2, True),
    ],
)
def test_each_model_has_one_scheduler(
    tmp_path: Path, launcher: str, ranks: int, served: bool
) -> None:
    config = make_config(
        tmp_path,
        1 << 20,
        ranks=ranks,
        entry=PLUGIN,
        block_tokens=16,
        budget=64,
        policy="recompute",
        max_requests=4,
    )
    config.parallel_config.distributed_executor_backend = launcher
    if served:
        check_parallelism(config)
        return
    with pytest.raises(LayoutError, match=r"external_launcher.*2 tensor-parallel.*allowed: 'mp'"):
        check_parallelism(config)
