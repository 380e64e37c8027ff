# SPDX-License-Identifier: Apache-2.0
"""Indexes of routers know from an engine's events what only FlexKV's tiers have."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.clients import environment
from integration.clients.vllm_router import Decision, VllmRouter
from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.harness.ports import hold_port
from integration.tests.corpus import ENGINE_BLOCK, EVICTED, WARM, Tokens
from integration.tests.disks import restorable
from integration.tests.steps import ask

PATIENCE_SECONDS = 60.0
ROOT = Path(__file__).parents[2]


class DynamoIndex:
    """Dynamo's index in a process of its own, which follows the events of one engine."""

    def __init__(self, python: Path, events: str, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, "-m", "integration.clients.dynamo_index", events, str(ENGINE_BLOCK)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._answer() == "ready"

    def tokens(self, prompt: Tokens) -> tuple[int, int]:
        """Tokens at the beginning of a prompt that the engine has in its own memory, and those
        that it has there or in host memory."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(prompt)) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        own, host = found["device_blocks"], found["host_pinned_blocks"]
        return own * ENGINE_BLOCK, host * ENGINE_BLOCK

    def await_tokens(self, own: list[int], host: list[int]) -> None:
        """Wait until it knows so many tokens of each prompt of `WARM`."""
        late = time.monotonic() + PATIENCE_SECONDS
        while (known := [self.tokens(prompt) for prompt in WARM]) != list(
            zip(own, host, strict=True)
        ):
            assert time.monotonic() < late, f"it knows {known}, not {own} and {host}"
            time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text()[-4000:]
        return json.loads(line)


@pytest.fixture
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
    chosen = connector.plugin(**flexkv())
    return host.start(engine_config(chosen, extra_args={"kv_events_config": published}))


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
    index = DynamoIndex(environment.python(), events, tmp_path / "dynamo.log")
    # A subscriber misses what was published before it had connected.
    for prompt in EVICTED:
        ask(engine, prompt)
        time.sleep(0.5)
        if index.tokens(prompt) != (0, 0):
            break
    else:
        pytest.fail("the index received no event")
    yield index
    index.close()


def test_dynamo_knows_after_a_reset_what_only_host_memory_has(
    engine: Engine, index: DynamoIndex
) -> None:
    for prompt in WARM:
        ask(engine, prompt)
    whole, nothing = restorable(WARM), [0] * len(WARM)
    index.await_tokens(whole, whole)
    engine.forget()
    # Dynamo forgets the blocks of all media at vLLM's AllBlocksCleared.
    index.await_tokens(nothing, whole)
    engine.reset_prefix_cache(reset_connector=True)
    index.await_tokens(nothing, nothing)


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
