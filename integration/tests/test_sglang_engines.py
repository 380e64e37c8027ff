# SPDX-License-Identifier: Apache-2.0
"""A real SGLang with two engines (`--dp-size 2`) and the quickstart's settings: one host memory and
one disk, of which each engine has half."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness.checkpoint import TINY
from integration.sglang.linker import linker_config
from integration.sglang.plain_server import PlainServer
from integration.tests.sglang_engines import ANSWER, ENGINES, EngineServers, prompts_of
from integration.tests.sglang_linked import PAGE_BYTES, PATIENCE, pages_of, plain_config, settle

GIB = 1 << 30
HOST_PAGES, DISK_GB = 400, 0.25
PROMPTS = prompts_of("engine")
CACHED = [pages_of(len(prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path, disk: Path
) -> Iterator[EngineServers]:
    folder = tmp_path_factory.mktemp("engines")
    with PlainServer(plain_config(model), folder / "plain.log") as server:
        plain = [server.generate(prompt, ANSWER).tokens for prompt in PROMPTS]
    settings = {
        "FLEXKV_CPU_CACHE_GB": f"{HOST_PAGES * PAGE_BYTES / GIB:.6f}",
        "FLEXKV_SSD_CACHE_GB": str(DISK_GB),
        "FLEXKV_SSD_CACHE_DIR": str(disk),
        "FLEXKV_RUNTIME_DIR": str(folder / "run"),
        "FLEXKV_SSD_TIMEOUT_SECONDS": str(PATIENCE),
        "FLEXKV_ALWAYS_LOAD": "1",
    }
    config = linker_config(model, TINY, settings, flags={"dp_size": ENGINES}, forked=True)
    made = EngineServers(folder, config, PROMPTS, plain)
    try:
        yield made
    finally:
        made.server.close()


def test_each_engine_has_half_of_the_sizes(engines: EngineServers, disk: Path) -> None:
    for engine in range(ENGINES):
        counts = engines.counts()
        host = counts.value("flexkv_capacity_blocks", tier="host", dp_rank=str(engine))
        slots = counts.value("flexkv_capacity_blocks", tier="disk", dp_rank=str(engine))
        assert HOST_PAGES // ENGINES - 2 <= host <= HOST_PAGES // ENGINES
        assert 0 < slots * PAGE_BYTES <= DISK_GB * GIB / ENGINES
    assert len(list(disk.iterdir())) == ENGINES


def test_each_engine_answers_by_what_it_has_stored(engines: EngineServers) -> None:
    for number, cached in enumerate(CACHED):
        for engine in range(ENGINES):
            assert engines.ask(engine, number) == 0
        engines.forget()
        for engine in range(ENGINES):
            assert engines.ask(engine, number) == cached


def test_engines_of_another_server_find_what_is_on_disk(engines: EngineServers, disk: Path) -> None:
    engines.restart()
    assert len(list(disk.iterdir())) == ENGINES
    assert [engines.ask_all(engine) for engine in range(ENGINES)] == [CACHED] * ENGINES
    hits = engines.counts().total("flexkv_hit_tokens_total", tier="disk")
    assert hits == ENGINES * sum(CACHED)


def test_a_clear_drops_the_pages_of_all_engines(engines: EngineServers) -> None:
    engines.server.flush()
    engines.server.ask("/hicache/storage-backend/clear", {})
    settle(engines.server)
    counts = engines.counts()
    assert counts.total("flexkv_blocks", tier="host") == 0
    assert counts.total("flexkv_blocks", tier="disk") == 0
    for engine in range(ENGINES):
        assert engines.ask(engine, 0) == 0
    settle(engines.server)
    engines.server.flush()
    for engine in range(ENGINES):
        assert engines.ask(engine, 0) == CACHED[0]


def test_a_second_server_starts_without_the_disk(engines: EngineServers, disk: Path) -> None:
    with engines.another() as server:
        engines.ask(1, 0, server)
    assert "one server with 2 engines per directory" in server.log()
    assert len(list(disk.iterdir())) == ENGINES
