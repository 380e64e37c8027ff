# SPDX-License-Identifier: Apache-2.0
"""SGLang's data-parallel engines share the node's service, beside an engine of vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.service.state import state_of
from integration.harness.checkpoint import TINY
from integration.sglang.linker import linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import Answer, SglangServer
from integration.tests.corpus import WARM
from integration.tests.disks import restorable, restored
from integration.tests.node_service import NodeService
from integration.tests.nodes import Nodes
from integration.tests.reference import Reference
from integration.tests.sglang_linked import PATIENCE, pages_of, plain_config, tokens
from integration.tests.steps import ask_each

ANSWER = 16
PROMPTS = [tokens(f"served {number}", length) for number, length in enumerate((200, 333, 900))]
LATE = tokens("served late", 500)


@pytest.fixture
def plain(tmp_path: Path, model: Path, sglang: Path) -> dict[tuple[int, ...], list[int]]:
    """SGLang's answers without FlexKV."""
    with PlainServer(plain_config(model), tmp_path / "plain.log") as server:
        return {
            tuple(prompt): server.generate(prompt, ANSWER).tokens for prompt in [*PROMPTS, LATE]
        }


@pytest.fixture
def server(tmp_path: Path, model: Path, service: NodeService) -> Iterator[SglangServer]:
    settings = {
        "FLEXKV_SERVICE": str(service.root),
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
        "FLEXKV_ALWAYS_LOAD": "1",
    }
    config = linker_config(model, TINY, settings, flags={"dp_size": 2}, forked=True)
    with SglangServer(config, tmp_path / "server.log") as made:
        yield made


def ask(server: SglangServer, engine: int, prompt: list[int]) -> Answer:
    return server.generate_all([prompt], ANSWER, routed_dp_rank=engine)[0]


def test_an_engine_loads_what_another_one_has_computed(
    plain: dict[tuple[int, ...], list[int]],
    server: SglangServer,
    service: NodeService,
    nodes: Nodes,
    reference: Reference,
) -> None:
    for prompt in PROMPTS:
        first = ask(server, 0, prompt)
        assert (first.cached_tokens, first.tokens) == (0, plain[tuple(prompt)])
    server.await_steps()
    for prompt in PROMPTS:
        found = ask(server, 1, prompt)
        assert (found.cached_tokens, found.tokens) == (pages_of(len(prompt)), plain[tuple(prompt)])

    # An engine of vLLM has a pool of its own.
    vllm = nodes.start(service=str(service.root))
    for _ in range(2):
        vllm.forget()
        answers = ask_each(vllm, WARM)
        reference.check_all(WARM, answers, what="vLLM beside SGLang")
    assert restored(answers) == restorable(WARM)
    pools = state_of(str(service.root)).pools
    kinds = [next(each for each in pool.identity if each.startswith("engine: ")) for pool in pools]
    assert [kind.split()[1] for kind in kinds] == ["sglang", "vllm"]
    assert [len(pool.engines) for pool in pools] == [2, 1]

    # The service is killed: what it had is loaded as before. With the next one, stores go on.
    service.kill()
    server.flush()
    for engine in range(2):
        for prompt in PROMPTS:
            found = ask(server, engine, prompt)
            assert found.tokens == plain[tuple(prompt)]
            assert found.cached_tokens == pages_of(len(prompt))
    service.start()
    end = time.monotonic() + PATIENCE
    while True:
        server.flush()
        assert ask(server, 0, LATE).tokens == plain[tuple(LATE)]
        server.await_steps()
        found = ask(server, 1, LATE)
        assert found.tokens == plain[tuple(LATE)]
        if found.cached_tokens == pages_of(len(LATE)):
            break
        assert time.monotonic() < end, "the engines do not attach again"
