# SPDX-License-Identifier: Apache-2.0
"""A real SGLang with two engines (`--dp-size 2`) and the quickstart's settings: one host memory and
one disk, of which each engine has half."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.campaign.counts import Counts
from integration.harness.checkpoint import TINY
from integration.sglang.linker import linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import Answer, SglangServer
from integration.tests.sglang_linked import (
    PAGE_BYTES,
    PATIENCE,
    pages_of,
    plain_config,
    settle,
    tokens,
)

ENGINES = 2
GIB = 1 << 30
HOST_PAGES, DISK_GB = 400, 0.25
ANSWER = 16
PROMPTS = [tokens(f"engine {number}", length) for number, length in enumerate((200, 333, 900))]


@dataclass
class Engines:
    """Servers with two engines each, one at a time, which share a disk.

    Attributes:
        folder: of their logs and the disk.
        model: that they serve.
        server: the one that runs.
        plain: the answers of SGLang without FlexKV.
    """

    folder: Path
    model: Path
    server: SglangServer
    plain: list[list[int]]

    def ask(self, engine: int, number: int) -> Answer:
        answer = ask(self.server, engine, PROMPTS[number])
        assert answer.tokens == self.plain[number]
        self.settle()
        return answer

    def forget(self) -> None:
        """Each engine has other bytes where its pages were, and none of its pages."""
        self.server.flush()
        for engine in range(ENGINES):
            for part in range(3):
                ask(self.server, engine, tokens(f"overwrite {part}", 1900))
                self.settle()
        self.server.flush()

    def settle(self) -> None:
        """Wait until all that was stored is on disk."""
        settle(self.server)

    def counts(self) -> Counts:
        return Counts(self.server.metrics(), "sglang:")


def ask(server: SglangServer, engine: int, prompt: list[int]) -> Answer:
    return server.generate_all([prompt], ANSWER, routed_dp_rank=engine)[0]


def start(folder: Path, model: Path, name: str) -> SglangServer:
    settings = {
        "FLEXKV_CPU_CACHE_GB": f"{HOST_PAGES * PAGE_BYTES / GIB:.6f}",
        "FLEXKV_SSD_CACHE_GB": str(DISK_GB),
        "FLEXKV_SSD_CACHE_DIR": str(folder / "disk"),
        "FLEXKV_RUNTIME_DIR": str(folder / "run"),
        "FLEXKV_SSD_TIMEOUT_SECONDS": str(PATIENCE),
        "FLEXKV_ALWAYS_LOAD": "1",
    }
    flags = {"dp_size": ENGINES}
    return SglangServer(
        linker_config(model, TINY, settings, flags=flags, forked=True), folder / f"{name}.log"
    )


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path
) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("engines")
    with PlainServer(plain_config(model), folder / "plain.log") as server:
        plain = [server.generate(prompt, ANSWER).tokens for prompt in PROMPTS]
    made = Engines(folder, model, start(folder, model, "one"), plain)
    try:
        yield made
    finally:
        made.server.close()


def test_each_engine_has_half_of_the_sizes(engines: Engines) -> None:
    for engine in range(ENGINES):
        counts = engines.counts()
        host = counts.value("flexkv_capacity_blocks", tier="host", dp_rank=str(engine))
        disk = counts.value("flexkv_capacity_blocks", tier="disk", dp_rank=str(engine))
        assert HOST_PAGES // ENGINES - 2 <= host <= HOST_PAGES // ENGINES
        assert 0 < disk * PAGE_BYTES <= DISK_GB * GIB / ENGINES
    assert len(list((engines.folder / "disk").iterdir())) == ENGINES


def test_each_engine_answers_by_what_it_has_stored(engines: Engines) -> None:
    for number, prompt in enumerate(PROMPTS):
        for engine in range(ENGINES):
            assert engines.ask(engine, number).cached_tokens == 0
        engines.forget()
        for engine in range(ENGINES):
            assert engines.ask(engine, number).cached_tokens == pages_of(len(prompt))
            assert engines.ask(engine, number).meta["dp_rank"] == engine


def test_engines_of_another_server_find_what_is_on_disk(engines: Engines) -> None:
    engines.settle()
    engines.server.kill()
    engines.server = start(engines.folder, engines.model, "two")
    assert len(list((engines.folder / "disk").iterdir())) == ENGINES
    for number, prompt in enumerate(PROMPTS):
        for engine in range(ENGINES):
            assert engines.ask(engine, number).cached_tokens == pages_of(len(prompt))
    disk = engines.counts().total("flexkv_hit_tokens_total", tier="disk")
    assert disk == ENGINES * sum(pages_of(len(prompt)) for prompt in PROMPTS)


def test_a_clear_drops_the_pages_of_all_engines(engines: Engines) -> None:
    engines.server.flush()
    engines.server.ask("/hicache/storage-backend/clear", {})
    engines.settle()
    counts = engines.counts()
    assert counts.total("flexkv_blocks", tier="host") == 0
    assert counts.total("flexkv_blocks", tier="disk") == 0
    for engine in range(ENGINES):
        assert engines.ask(engine, 0).cached_tokens == 0
    engines.server.flush()
    for engine in range(ENGINES):
        assert engines.ask(engine, 0).cached_tokens == pages_of(len(PROMPTS[0]))


def test_a_second_server_starts_without_the_disk(engines: Engines) -> None:
    with start(engines.folder, engines.model, "beside") as server:
        assert ask(server, 1, PROMPTS[0]).tokens == engines.plain[0]
    assert "one server with 2 engines per directory" in server.log()
    assert len(list((engines.folder / "disk").iterdir())) == ENGINES
