# SPDX-License-Identifier: Apache-2.0
"""Tokens are equal with two ranks, each of which stores and restores its own shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.corpus import CONCURRENT, LONG, PARTIAL, PREFIX, WARM
from integration.tests.reference import Reference
from integration.tests.steps import ask, ask_each, ask_together, blocks_of, whole_blocks


@pytest.fixture
def two_ranks(
    host: EngineHost,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    engine = host.get(engine_config(connector.plugin(**flexkv()), tensor_parallel_size=2))
    engine.reset_prefix_cache(reset_connector=True)
    return engine


def test_warm(two_ranks: Engine, reference: Reference) -> None:
    prompts = WARM + LONG
    reference.check_all(prompts, ask_each(two_ranks, prompts), what="cold")
    two_ranks.forget()
    warm = ask_each(two_ranks, prompts)
    reference.check_all(prompts, warm, what="warm")
    assert [answer.cached_tokens for answer in warm] == [whole_blocks(len(p)) for p in prompts]


def test_concurrent(two_ranks: Engine, reference: Reference) -> None:
    reference.check_all(CONCURRENT, ask_together(two_ranks, CONCURRENT), what="cold")
    two_ranks.forget()
    warm = ask_together(two_ranks, CONCURRENT)
    reference.check_all(CONCURRENT, warm, what="warm")
    assert all(answer.cached_tokens for answer in warm)


def test_partial(two_ranks: Engine, reference: Reference) -> None:
    ask(two_ranks, PREFIX)
    for case in PARTIAL:
        two_ranks.forget()
        answer = ask(two_ranks, case.prompt)
        reference.check(case.prompt, answer, what=case.name)
        assert (answer.cached_tokens or 0) >= case.expected_hit, case.name


def test_both_ranks_restore_their_bytes(two_ranks: Engine) -> None:
    computed = two_ranks.rpc("keeps_weights_digests", blocks_of(two_ranks, PREFIX)[:-1])
    assert len(computed) == 2
    assert computed[0] != computed[1]
    two_ranks.forget()
    restored = two_ranks.rpc("keeps_weights_digests", blocks_of(two_ranks, PREFIX)[:-1])
    assert restored == computed
