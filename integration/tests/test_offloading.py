# SPDX-License-Identifier: Apache-2.0
"""The same tests with FlexKV under vLLM's own OffloadingConnector: tokens are equal warm, over
partial prefixes, concurrently and after aborts; a wrong byte in host memory would be noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.reference import Reference
from integration.tests.steps import refusal
from integration.tests.test_equality_aborted import (
    test_aborts_during_loads,
    test_aborts_while_computing,
)
from integration.tests.test_equality_concurrent import (
    test_a_hit_while_others_decode,
    test_loads_beside_computing,
    test_sixteen_at_once,
    test_the_same_prompt_sixteen_times,
)
from integration.tests.test_equality_partial import (
    test_a_prompt_stores_its_own_end,
    test_partial_hits,
    test_the_engines_own_hit_ends_inside_a_block,
)
from integration.tests.test_equality_warm import (
    test_a_conversation,
    test_the_engines_own_hits_stay_equal,
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
    "test_a_conversation",
    "test_a_flipped_byte_in_the_arena_changes_the_tokens",
    "test_a_hit_while_others_decode",
    "test_a_prompt_stores_its_own_end",
    "test_a_reset_with_the_connector_leaves_no_hits",
    "test_aborts_during_loads",
    "test_aborts_while_computing",
    "test_loads_beside_computing",
    "test_partial_hits",
    "test_restored_blocks_have_the_bytes_that_were_computed",
    "test_sixteen_at_once",
    "test_the_engines_own_hit_ends_inside_a_block",
    "test_the_engines_own_hits_stay_equal",
    "test_the_same_prompt_sixteen_times",
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
    host: EngineHost,
    offloading: Callable[..., Connector],
    engine_config: Callable[..., EngineConfig],
) -> None:
    said = refusal(lambda: host.start(engine_config(offloading(cpu_cache_gib=1))))
    assert "unknown key 'cpu_cache_gib' in kv_connector_extra_config" in said
