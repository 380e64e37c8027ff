# SPDX-License-Identifier: Apache-2.0
"""The settings of one engine of a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexkv import CacheConfig
from flexkv_sglang.settings import engines_of, share_of_engine


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        ({"dp_size": 1, "attn_dp_size": 1}, 1),
        ({"dp_size": 2, "attn_dp_size": 1}, 2),
        ({"dp_size": 1, "attn_dp_size": 4}, 4),
        ({"dp_size": 2}, 2),
    ],
    ids=["one", "replicas", "DP attention", "replicas of an older SGLang"],
)
def test_a_server_has_an_engine_for_each_scheduler(settings: dict[str, int], engines: int) -> None:
    assert engines_of(SimpleNamespace(**settings)) == engines


def test_each_engine_of_a_server_has_an_equal_part_of_its_sizes() -> None:
    server = CacheConfig(
        cpu_cache_gb=64.0,
        ssd_cache_gb=500.0,
        ssd_cache_dir=("/nvme",),
        ssd_write_gb_per_day=1000.0,
        mooncake_segment_gb=4.0,
    )
    engine = share_of_engine(server, 4)
    assert (engine.cpu_cache_gb, engine.ssd_cache_gb) == (16.0, 125.0)
    assert (engine.ssd_write_gb_per_day, engine.mooncake_segment_gb) == (250.0, 1.0)
    assert (engine.ssd_in_use, engine.ssd_cache_dir) == ("error", ("/nvme",))
    assert share_of_engine(server, 1) == server


def test_sizes_that_are_not_given_stay_so() -> None:
    engine = share_of_engine(CacheConfig(), 4)
    assert engine.cpu_cache_gb is engine.ssd_cache_gb is engine.ssd_write_gb_per_day is None
