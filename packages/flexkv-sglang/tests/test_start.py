# SPDX-License-Identifier: Apache-2.0
"""What a start says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang_world import Rank


def test_auto_follows_requests(make_rank: Callable[..., Rank], made_policies: list[str]) -> None:
    make_rank()
    make_rank(settings={"eviction_policy": "lru"})
    assert made_policies == ["hazard", "lru"]


def test_each_engine_of_a_server_has_a_folder(
    make_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    disk = {"ssd_cache_gb": 1 / 64, "ssd_cache_dir": (str(tmp_path / "disk"),)}
    for _ in range(2):
        make_rank(settings=disk, engines=2)
    assert len(list((tmp_path / "disk").iterdir())) == 2


@pytest.mark.parametrize(("page_size", "advised"), [(4, True), (64, False)])
def test_larger_pages_are_advised_where_there_are_any(
    make_rank: Callable[..., Rank],
    caplog: pytest.LogCaptureFixture,
    page_size: int,
    advised: bool,
) -> None:
    with caplog.at_level(logging.WARNING, "flexkv.sglang"):
        make_rank(page_size=page_size)
    assert ("--page-size 64 makes this cheaper" in caplog.text) is advised


@pytest.mark.parametrize(("slots", "warns"), [(40, True), (200, False)])
def test_host_memory_is_compared_with_sglangs_own_pages(
    make_rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, slots: int, warns: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        make_rank(pages=100, settings={"cpu_cache_gb": slots * 4096 / (1 << 30)})
    assert ("the engine's own KV cache" in caplog.text) is warns
