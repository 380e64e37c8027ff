# SPDX-License-Identifier: Apache-2.0
"""DP attention on a real SGLang with FlexKV: each group of ranks has a scheduler and a cache of its
own, or all share the node's service."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.harness.checkpoint import TINY
from integration.harness.families import write_family
from integration.harness.ports import hold_port
from integration.sglang.linker import linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import Answer, ServerConfig, SglangServer
from integration.tests.node_service import NodeService
from integration.tests.sglang_linked import PAGE_BYTES, PATIENCE, pages_of, settle, tokens

ENGINES, RANKS = 2, 4
"""Two groups of two ranks."""

ANSWER = 16
PROMPTS = [
    tokens(f"DP attention {number}", length) for number, length in enumerate((200, 333, 900))
]
CACHED = [pages_of(len(prompt)) for prompt in PROMPTS]


class AttentionServer:
    """A server with FlexKV, and the answers of one without it and with one rank.

    Args:
        folder: of its logs.
        model: that it serves.
        settings: FlexKV's.
        plain: the answers.
    """

    def __init__(
        self, folder: Path, model: Path, settings: dict[str, str], plain: list[list[int]]
    ) -> None:
        self._folder = folder
        self._plain = plain
        self._starts = 0
        settings |= {
            "FLEXKV_RUNTIME_DIR": str(folder / "run"),
            "FLEXKV_SSD_TIMEOUT_SECONDS": str(PATIENCE),
            "FLEXKV_ALWAYS_LOAD": "1",
        }
        self._config = linker_config(
            model,
            TINY,
            settings,
            flags={
                "dp_size": ENGINES,
                "enable_dp_attention": True,
                "dist_init_addr": f"127.0.0.1:{free_ports()}",
            },
            tensor_parallel_size=RANKS,
            forked=True,
        )
        self.start()

    def start(self) -> None:
        self._starts += 1
        self.server = SglangServer(self._config, self._folder / f"{self._starts}.log")

    def ask(self, engine: int, number: int) -> int:
        """Check the answer to a prompt. Returns how much of the prompt was cached."""
        answer = self._ask(engine, PROMPTS[number])
        assert (answer.tokens, answer.meta["dp_rank"]) == (self._plain[number], engine)
        return answer.cached_tokens

    def ask_all(self, engine: int) -> list[int]:
        return [self.ask(engine, number) for number in range(len(PROMPTS))]

    def ask_at_once(self) -> list[list[int]]:
        """Both engines at the same time."""
        with ThreadPoolExecutor(ENGINES) as pool:
            return list(pool.map(self.ask_all, range(ENGINES)))

    def forget(self) -> None:
        """No engine has anything of a prompt in SGLang's own pages."""
        self.settle()
        self.server.flush()
        for engine in range(ENGINES):
            for part in range(3):
                self._ask(engine, tokens(f"overwrite {part}", 1900))
                self.settle()
        self.server.flush()

    def settle(self) -> None:
        """Wait until all that was stored has its place."""
        settle(self.server)

    def _ask(self, engine: int, prompt: list[int]) -> Answer:
        return self.server.generate_all([prompt], ANSWER, routed_dp_rank=engine)[0]


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
def own(tmp_path: Path, divided: Path, plain: list[list[int]]) -> Iterator[AttentionServer]:
    """Each engine has memory for fewer pages than it uses, and a folder on disk."""
    settings = {
        "FLEXKV_CPU_CACHE_GB": f"{ENGINES * 200 * PAGE_BYTES / (1 << 30):.6f}",
        "FLEXKV_SSD_CACHE_GB": "0.25",
        "FLEXKV_SSD_CACHE_DIR": str(tmp_path / "disk"),
    }
    made = AttentionServer(tmp_path, divided, settings, plain)
    yield made
    made.server.close()


@pytest.fixture
def served(
    tmp_path: Path, divided: Path, plain: list[list[int]], service: NodeService
) -> Iterator[AttentionServer]:
    """The engines use the node's service."""
    made = AttentionServer(tmp_path, divided, {"FLEXKV_SERVICE": str(service.root)}, plain)
    yield made
    made.server.close()


def test_each_engine_has_a_cache_of_its_own(own: AttentionServer) -> None:
    assert own.ask_at_once() == [[0] * len(PROMPTS)] * ENGINES
    own.forget()
    assert own.ask_at_once() == [CACHED] * ENGINES
    own.settle()
    own.server.kill()
    own.start()
    assert own.ask_at_once() == [CACHED] * ENGINES


def test_engines_of_the_service_share_one_cache(served: AttentionServer) -> None:
    assert served.ask_all(0) == [0] * len(PROMPTS)
    served.settle()
    assert served.ask_all(1) == CACHED
