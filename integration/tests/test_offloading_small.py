# SPDX-License-Identifier: Apache-2.0
"""FlexKV under vLLM's own OffloadingConnector where memory is short: tokens are equal after
evictions and preemptions, and from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests import disks, test_equality_preempted
from integration.tests.reference import Reference
from integration.tests.test_disk_warm import (
    test_aborts_while_the_disk_reads,
    test_sixteen_requests_share_a_prefix_on_disk,
    test_what_left_host_memory_comes_back,
)
from integration.tests.test_equality_evicted import (
    ARENA_GB,
    test_a_prompt_larger_than_the_arena,
    test_aborts_leave_no_slot_behind,
    test_eviction,
    test_eviction_under_concurrency,
)

__all__ = [
    "test_a_prompt_larger_than_the_arena",
    "test_aborts_leave_no_slot_behind",
    "test_aborts_while_the_disk_reads",
    "test_eviction",
    "test_eviction_under_concurrency",
    "test_sixteen_requests_share_a_prefix_on_disk",
    "test_what_left_host_memory_comes_back",
]

FEW_BLOCKS = 100


@pytest.fixture
def tiny_arena(
    host: EngineHost,
    reference: Reference,
    offloading: Callable[..., Connector],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    """With `lru`, on which some of these tests count, and as few blocks as the longest prompt
    needs: fewer than the requests of `test_preempted_requests`."""
    settings = offloading(cpu_cache_gb=ARENA_GB, eviction_policy="lru")
    engine = host.get(engine_config(settings, num_blocks=FEW_BLOCKS, max_model_len=3072))
    engine.reset_prefix_cache(reset_connector=True)
    return engine


def test_preemptions(host: EngineHost, tiny_arena: Engine, reference: Reference) -> None:
    test_equality_preempted.test_preempted_requests(host, tiny_arena, reference)


@pytest.fixture
def disk_engine(
    host: EngineHost,
    reference: Reference,
    offloading: Callable[..., Connector],
    engine_config: Callable[..., EngineConfig],
    work_dir: Path,
) -> Engine:
    settings = disks.settings(work_dir / "offloading-disk")
    engine = host.get(engine_config(offloading(**settings)))
    engine.forget()
    return engine
