# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of two ranks each on a real SGLang with FlexKV, and stages that use the node's
service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.harness.checkpoint import TINY
from integration.sglang.linker import linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import SglangServer
from integration.tests.node_service import NodeService
from integration.tests.sglang_linked import (
    ANSWER,
    FAILED,
    WARM,
    Linked,
    Plain,
    ask_plainly,
    pages_of,
    plain_config,
)

STAGES = {"pp_size": 2}
RANKS = 2
"""Of each stage."""

CHUNK = 128
KV_TOKENS = 2048


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path) -> Plain:
    log = tmp_path_factory.mktemp("stages") / "plain.log"
    with PlainServer(plain_config(model), log) as server:
        return ask_plainly(server)


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory, model: Path, plain: Plain) -> Iterator[Linked]:
    linked = Linked(tmp_path_factory.mktemp("linked"), model, STAGES)
    linked.plain = plain
    linked.start(
        forked=True, chunked_prefill=CHUNK, tensor_parallel_size=RANKS, kv_tokens=KV_TOKENS
    )
    try:
        yield linked
    finally:
        linked.close()


def test_stages_of_two_ranks_load_what_they_have_stored(linked: Linked) -> None:
    for prompt in (*WARM, FAILED):
        linked.ask(prompt)
    linked.check_all(WARM)

    linked.forget()
    linked.answer_to_wrong_bytes(FAILED, 1)  # the bytes of one rank matter


def test_stages_of_two_ranks_load_what_an_earlier_server_has_stored(linked: Linked) -> None:
    for prompt in WARM:
        linked.ask(prompt)
    linked.restart()
    linked.check_all(WARM)


@pytest.fixture
def served(
    tmp_path: Path, model: Path, plain: Plain, service: NodeService
) -> Iterator[Callable[[], SglangServer]]:
    """Starts servers, one after the other."""
    settings = {
        "FLEXKV_SERVICE": str(service.root),
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
        "FLEXKV_ALWAYS_LOAD": "1",
    }
    config = linker_config(model, TINY, settings, flags=STAGES, forked=True, chunked_prefill=CHUNK)
    servers: list[SglangServer] = []

    def start() -> SglangServer:
        servers.append(SglangServer(config, tmp_path / f"{len(servers)}.log"))
        return servers[-1]

    yield start
    for each in servers:
        each.close()


def test_stages_share_the_nodes_service_with_a_later_server(
    served: Callable[[], SglangServer], plain: Plain
) -> None:
    server = served()
    for cached in (False, True):
        for prompt in WARM:
            answer = server.generate(prompt, ANSWER)
            assert answer.tokens == plain.of(prompt)
            assert answer.cached_tokens == (pages_of(len(prompt)) if cached else 0)
        server.await_steps()
        server.flush()
        server.overwrite(after_each=server.await_steps)
    server.kill()
    server = served()
    for prompt in WARM:
        answer = server.generate(prompt, ANSWER)
        assert answer.tokens == plain.of(prompt)
        assert answer.cached_tokens == pages_of(len(prompt))
