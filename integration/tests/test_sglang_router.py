# SPDX-License-Identifier: Apache-2.0
"""SGLang's router sends a conversation to the engine whose FlexKV has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.clients import environment
from integration.clients.sglang_router import SglangRouter
from integration.harness.checkpoint import TINY
from integration.sglang.linker import linker_config
from integration.sglang.server import SglangServer
from integration.tests.sglang_linked import tokens

PROMPT, KV_TOKENS, ANSWER = 1200, 4096, 8


@pytest.fixture
def engines(model: Path, sglang: Path, tmp_path: Path) -> Iterator[list[SglangServer]]:
    with contextlib.ExitStack() as started:

        def start(number: int) -> SglangServer:
            settings = {
                "FLEXKV_CPU_CACHE_GB": "0.2",
                "FLEXKV_RUNTIME_DIR": str(tmp_path / f"runtime {number}"),
                "FLEXKV_ALWAYS_LOAD": "true",
            }
            config = linker_config(model, TINY, settings, kv_tokens=KV_TOKENS, forked=True)
            server = SglangServer(config, tmp_path / f"engine {number}.log")
            return started.enter_context(server)

        yield [start(number) for number in range(2)]


def test_conversations_return_to_the_engine_whose_host_memory_has_them(
    engines: list[SglangServer], tmp_path: Path
) -> None:
    """Both engines have evicted them. With `round_robin`, each goes to the other engine."""
    urls = [f"http://127.0.0.1:{each.address[1]}" for each in engines]
    loaded = {}
    for policy in ("cache_aware", "round_robin"):
        log = tmp_path / f"{policy}.log"
        with SglangRouter(environment.python(), urls, policy, log) as router:
            said = [list(tokens(f"{policy} {number}", PROMPT)) for number in range(3)]
            answers = [router.generate(each, ANSWER).tokens for each in said]
            for number in range(-(-KV_TOKENS // PROMPT) + 1):
                for engine in engines:
                    engine.generate(tokens(f"{policy} other {number}", PROMPT), 1)
            again = [
                [*each, *answer, *tokens(f"{policy} next {number}", 20)]
                for number, (each, answer) in enumerate(zip(said, answers, strict=True))
            ]
            loaded[policy] = [router.generate(each, ANSWER).from_host for each in again]
    assert loaded == {"cache_aware": [PROMPT] * 3, "round_robin": [0] * 3}
