# SPDX-License-Identifier: Apache-2.0
"""The ways into vLLM: our plugin (most other tests), vLLM's own shim (also inside MultiConnector).
`test_equality_preempted` has our module by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.corpus import (
    CONCURRENT,
    ENGINE_BLOCK,
    LONG,
    PREEMPTED,
    PREEMPTED_NEW_TOKENS,
    WARM,
)
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, ask_together, external_hits, whole_blocks

# As in the test of preemptions, but large enough for the long prompts.
BLOCKS = 131
FORKED = True
ENTRIES = {
    "vLLM's own shim": (connector.in_tree_shim, FORKED),
    # Processes begun anew each find the connector for themselves, here through both of vLLM's own.
    "vLLM's own shim in MultiConnector": (
        lambda **extra: connector.multi(connector.in_tree_shim(**extra)),
        not FORKED,
    ),
}


@pytest.fixture(params=[pytest.param(entry, id=name) for name, entry in ENTRIES.items()])
def entered(
    request: pytest.FixtureRequest,
    host: EngineHost,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    make, forked = request.param
    chosen: Connector = make(**flexkv())
    return host.start(
        engine_config(chosen, num_blocks=BLOCKS, max_model_len=4096 + 32, forked=forked)
    )


def test_an_entry_path(entered: Engine, reference: Reference) -> None:
    """One engine for each path, taken through the main cases one after the other."""
    prompts = WARM + LONG
    reference.check_all(prompts, ask_each(entered, prompts), what="cold")
    entered.forget()
    warm = ask_each(entered, prompts)
    reference.check_all(prompts, warm, what="warm")
    assert [answer.cached_tokens for answer in warm] == [whole_blocks(len(p)) for p in prompts]

    entered.forget()
    reference.check_all(CONCURRENT, ask_together(entered, CONCURRENT), what="concurrent")
    entered.forget()
    hits = external_hits(entered)
    reference.check_all(CONCURRENT, ask_together(entered, CONCURRENT), what="concurrent, warm")
    assert external_hits(entered) > hits

    # They begin together, and so outgrow the blocks before one ends, though two of the same prompt
    # share what it fills.
    crowd = PREEMPTED * 2
    filled = len(crowd[0]) // ENGINE_BLOCK
    grown = (len(crowd[0]) + PREEMPTED_NEW_TOKENS) // ENGINE_BLOCK
    assert len(PREEMPTED) * (2 * grown - filled) > BLOCKS
    for what in ("preempted", "preempted, warm"):
        entered.forget()
        preemptions = entered.counter("vllm:num_preemptions")
        answers = ask_together(entered, crowd, PREEMPTED_NEW_TOKENS, all_queued=True)
        reference.check_all(crowd, answers, PREEMPTED_NEW_TOKENS, what)
        assert entered.counter("vllm:num_preemptions") > preemptions
