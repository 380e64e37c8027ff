# SPDX-License-Identifier: Apache-2.0
"""FlexKV under vLLM's own OffloadingConnector: tests of the plugin that the other interface could
break. Tokens are equal warm, over partial prefixes, concurrently and after aborts; a wrong byte in
host memory would be noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.reference import Reference
from integration.tests.steps import forked_refusal
from integration.tests.test_equality_aborted import (
    test_aborts_during_loads,
)
from integration.tests.test_equality_concurrent import (
    test_loads_beside_computing,
    test_sixteen_at_once,
)
from integration.tests.test_equality_partial import (
    test_partial_hits,
    test_the_engines_own_hit_ends_inside_a_block,
)
from integration.tests.test_equality_warm import (
    test_warm_after_a_reset,
)
from integration.tests.test_notices_wrong_bytes import (
    test_a_flipped_byte_in_the_arena_changes_the_tokens,
    test_restored_blocks_have_the_bytes_that_were_computed,
)
from integration.tests.test_salts_and_reset import (
    test_a_reset_with_the_connector_leaves_no_hits,
    test_two_salts_share_nothing,
)

__all__ = [
    "test_a_flipped_byte_in_the_arena_changes_the_tokens",
    "test_a_reset_with_the_connector_leaves_no_hits",
    "test_aborts_during_loads",
    "test_loads_beside_computing",
    "test_partial_hits",
    "test_restored_blocks_have_the_bytes_that_were_computed",
    "test_sixteen_at_once",
    "test_the_engines_own_hit_ends_inside_a_block",
    "test_two_salts_share_nothing",
    "test_warm_after_a_reset",
]


@pytest.fixture
def engine(
    host: EngineHost,
    reference: Reference,
    offloading: Callable[..., Connector],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    engine = host.get(engine_config(offloading()))
    engine.reset_prefix_cache(reset_connector=True)
    return engine


def test_what_cannot_work_is_refused(
    offloading: Callable[..., Connector],
    engine_config: Callable[..., EngineConfig],
    tmp_path: Path,
) -> None:
    config = engine_config(offloading(cpu_cache_gib=1))
    said = forked_refusal(config, tmp_path / "refused.log")
    assert "unknown key 'cpu_cache_gib' in kv_connector_extra_config" in said
