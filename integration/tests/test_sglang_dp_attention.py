# SPDX-License-Identifier: Apache-2.0
"""DP attention on a real SGLang with FlexKV: each group of ranks has a scheduler and a cache of its
own, or all share the node's service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.harness.checkpoint import TINY
from integration.harness.families import write_family
from integration.harness.ports import hold_port
from integration.sglang.linker import linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import ServerConfig
from integration.tests.node_service import NodeService
from integration.tests.sglang_engines import ANSWER, ENGINES, EngineServers, prompts_of
from integration.tests.sglang_linked import PAGE_BYTES, PATIENCE, pages_of, settle

RANKS = 4
"""Two groups of two ranks."""

PROMPTS = prompts_of("DP attention")
CACHED = [pages_of(len(prompt)) for prompt in PROMPTS]

Start = Callable[..., EngineServers]


def free_ports() -> int:
    """The first of some ports that SGLang takes in a row, of those that the kernel gives nobody."""
    with hold_port(range(20_000, 32_000, 16)) as held:
        port: int = held.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def divided(work_dir: Path) -> Path:
    return write_family("qwen3", work_dir)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, divided: Path, sglang: Path) -> list[list[int]]:
    log = tmp_path_factory.mktemp("plain") / "plain.log"
    with PlainServer(ServerConfig(divided, TINY, forked=True), log) as server:
        return [server.generate(prompt, ANSWER).tokens for prompt in PROMPTS]


@pytest.fixture
def start(tmp_path: Path, divided: Path, plain: list[list[int]]) -> Iterator[Start]:
    """Starts servers with settings of FlexKV."""
    started: list[EngineServers] = []

    def make(**settings: str) -> EngineServers:
        settings |= {
            "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
            "FLEXKV_SSD_TIMEOUT_SECONDS": str(PATIENCE),
            "FLEXKV_ALWAYS_LOAD": "1",
        }
        flags = {
            "dp_size": ENGINES,
            "enable_dp_attention": True,
            "dist_init_addr": f"127.0.0.1:{free_ports()}",
        }
        config = linker_config(
            divided, TINY, settings, flags=flags, tensor_parallel_size=RANKS, forked=True
        )
        started.append(EngineServers(tmp_path, config, PROMPTS, plain))
        return started[-1]

    yield make
    for each in started:
        each.server.close()


def test_each_engine_has_a_cache_of_its_own(start: Start, tmp_path: Path) -> None:
    """Each engine has memory for fewer pages than it uses, and a folder on disk."""
    own = start(
        FLEXKV_CPU_CACHE_GB=f"{ENGINES * 200 * PAGE_BYTES / (1 << 30):.6f}",
        FLEXKV_SSD_CACHE_GB="0.25",
        FLEXKV_SSD_CACHE_DIR=str(tmp_path / "disk"),
    )
    assert own.ask_at_once() == [[0] * len(PROMPTS)] * ENGINES
    own.forget()
    assert own.ask_at_once() == [CACHED] * ENGINES
    own.restart()
    assert own.ask_at_once() == [CACHED] * ENGINES


def test_engines_of_the_service_share_one_cache(service: NodeService, start: Start) -> None:
    served = start(FLEXKV_SERVICE=str(service.root))
    assert served.ask_all(0) == [0] * len(PROMPTS)
    settle(served.server)
    assert served.ask_all(1) == CACHED
