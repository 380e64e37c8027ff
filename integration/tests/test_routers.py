# SPDX-License-Identifier: Apache-2.0
"""Indexes of routers know from an engine's events what only FlexKV's tiers have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.clients import environment
from integration.clients.dynamo import DynamoIndex
from integration.clients.vllm_router import Decision, VllmRouter
from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.harness.ports import hold_port
from integration.tests.corpus import ENGINE_BLOCK, EVICTED, WARM
from integration.tests.disks import restorable
from integration.tests.steps import ask

PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def events() -> Iterator[str]:
    """An address for the events of an engine."""
    with hold_port() as held:
        yield f"tcp://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def engine(
    host: EngineHost,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
    events: str,
) -> Engine:
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events.replace("127.0.0.1", "*"),
    }
    chosen = connector.plugin(**flexkv(block_tokens=ENGINE_BLOCK))
    engine = host.get(engine_config(chosen, extra_args={"kv_events_config": published}))
    engine.reset_prefix_cache(reset_connector=True)
    return engine


@pytest.fixture
def router(engine: Engine, events: str, tmp_path: Path) -> Iterator[VllmRouter]:
    program = environment.python().with_name("vllm-router")
    with VllmRouter(program, events, ENGINE_BLOCK, tmp_path / "router.log") as router:
        for prompt in EVICTED:
            ask(engine, prompt)
            time.sleep(0.5)
            if router.send(prompt).credited:
                break
        else:
            pytest.fail("the router received no event")
        yield router


@pytest.fixture
def index(engine: Engine, events: str, tmp_path: Path) -> Iterator[DynamoIndex]:
    index = DynamoIndex(environment.python(), events, ENGINE_BLOCK, tmp_path / "dynamo.log")
    # A subscriber misses what was published before it had connected.
    for prompt in EVICTED:
        ask(engine, prompt)
        time.sleep(0.5)
        if any(index.tokens(prompt)):
            break
    else:
        pytest.fail("the index received no event")
    yield index
    index.close()


def await_tokens(index: DynamoIndex, own: list[int], host: list[int]) -> None:
    """Wait until the index knows so many tokens of each prompt of `WARM`."""
    expected = list(zip(own, host, strict=True))
    index.wait(lambda: [index.tokens(prompt)[:2] for prompt in WARM] == expected)


def test_dynamo_knows_after_a_reset_what_only_host_memory_has(
    engine: Engine, index: DynamoIndex
) -> None:
    for prompt in WARM:
        ask(engine, prompt)
    whole, nothing = restorable(WARM), [0] * len(WARM)
    await_tokens(index, whole, whole)
    engine.forget()
    # Dynamo forgets the blocks of all media at vLLM's AllBlocksCleared.
    await_tokens(index, nothing, whole)
    engine.reset_prefix_cache(reset_connector=True)
    await_tokens(index, nothing, nothing)


def test_vllm_router_sends_prompts_where_only_host_memory_has_them(
    engine: Engine, router: VllmRouter
) -> None:
    for prompt in WARM:
        ask(engine, prompt)
    whole = restorable(WARM)

    def await_credits(expected: Callable[[int, int], bool]) -> list[Decision]:
        late = time.monotonic() + PATIENCE_SECONDS
        while True:
            sent = [router.send(prompt) for prompt in WARM]
            if all(map(expected, (each.credited for each in sent), whole)):
                return sent
            assert time.monotonic() < late, f"{sent} of {whole} tokens"
            time.sleep(0.1)

    # The router credits tokens in host memory less than those of the engine itself.
    own = [each.credited for each in await_credits(lambda credit, tokens: credit > 0.85 * tokens)]
    engine.forget()
    sent = await_credits(lambda credit, tokens: 0 < credit < 0.85 * tokens)
    assert all(each.to_engine for each in sent)
    assert all(each.credited < before for each, before in zip(sent, own, strict=True))
    engine.reset_prefix_cache(reset_connector=True)
    await_credits(lambda credit, _: credit == 0)
