# SPDX-License-Identifier: Apache-2.0
"""SGLang's own counts say which part of a hit came from where; without an engine."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers.io_struct import ClearHiCacheReqInput
from sglang.srt.managers.schedule_batch import split_cached_prefix_by_tier
from sglang.srt.managers.scheduler import Scheduler
from sglang_world import PATIENCE_SECONDS  # type: ignore[import-not-found]

from flexkv import ConfigError
from integration.sglang.with_sglang.linked import PAGE, LinkedRank

PROMPT = list(range(100, 100 + 4 * PAGE))


def by_tier(request: Any) -> tuple[int, int, int]:
    """Tokens from the device, host memory and storage, as SGLang's details count them."""
    found: tuple[int, int, int] = split_cached_prefix_by_tier(
        prefix_len=request.prefix_len,
        host_hit_len=request.materialized_host_hit_len(),
        storage_hit_len=request.storage_hit_length,
        storage_hit_start=request.storage_hit_start,
        host_hit_is_storage=request.host_hit_is_storage,
    )
    return found


def test_sglangs_own_code_says_that_the_plugin_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang runs it if `SGLANG_PLUGINS` leaves FlexKV out."""
    monkeypatch.setenv("SGLANG_PLUGINS", "others")
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS is 'others'"):
        importlib.import_module("sglang.srt.mem_cache.storage.flexkv.flexkv_connector")


def test_sglangs_answer_says_that_the_storage_was_cleared(tmp_path: Path) -> None:
    linked = LinkedRank(tmp_path, settings={"always_load": True})
    linked.compute(PROMPT, seed=1)
    linked.settle()
    linked.forget()
    assert Scheduler.clear_hicache_storage_wrapped(object(), ClearHiCacheReqInput()).success
    request = linked.request("r", [*PROMPT, 1])
    assert linked.run(request)[0] == 0
    linked.compute(PROMPT, seed=1)
    linked.settle()
    linked.forget()
    assert linked.run(linked.request("s", [*PROMPT, 1]))[0] == len(PROMPT)
    linked.close()


@pytest.mark.parametrize("in_host", [0, 2, 4])
def test_what_a_disk_gave_counts_as_storage(tmp_path: Path, in_host: int) -> None:
    settings = {
        "ssd_cache_gb": 1 / 64,
        "ssd_cache_dir": (str(tmp_path / "disk"),),
        "ssd_timeout_seconds": PATIENCE_SECONDS,
        "always_load": True,
    }
    first = LinkedRank(tmp_path, settings=settings)
    first.compute(PROMPT, seed=1)
    first.settle()
    first.close()
    second = LinkedRank(tmp_path, settings=settings)
    if in_host:
        second.compute(PROMPT[: in_host * PAGE], seed=1)
        second.settle()
        second.forget()
    request = second.request("r", [*PROMPT, 1])
    deadline = time.monotonic() + PATIENCE_SECONDS
    second.look_ahead([request])
    while any(second.rank.side.held(["r"])):
        assert time.monotonic() < deadline
        second.tree.check_hicache_events()
    loaded, served, _ = second.run(request)
    assert (loaded, served) == (len(PROMPT), True)
    assert by_tier(request) == (0, in_host * PAGE, len(PROMPT) - in_host * PAGE)
    second.close()
