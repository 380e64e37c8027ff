# SPDX-License-Identifier: Apache-2.0
"""What is asked of engines on a GPU, and in which parts; integration/tests asks a real one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration.bench.rows import Row
from integration.gpu import tokens
from integration.gpu.results import Log
from integration.gpu.tokens import ASYNC, LAYERWISE, ON_GPU, TAIL, Questions, token_rows
from integration.harness.answers import Completion, EngineStartError

SMALLEST_ENGINE_BLOCK = 16
"""Tokens, with vLLM's default on GPUs."""

by_name = pytest.mark.parametrize("asked", ON_GPU, ids=lambda asked: asked.name)


@by_name
def test_both_caches_have_the_same_part_of_each_prompt(asked: Questions) -> None:
    assert TAIL < SMALLEST_ENGINE_BLOCK
    assert asked.block_tokens % asked.engine.get("block_size", SMALLEST_ENGINE_BLOCK) == 0
    # No block ends within an answer, so that one prompt stores what the next ones load.
    assert asked.block_tokens > TAIL + tokens.NEW_TOKENS
    for prompt, blocks in zip(asked.prompts, asked.blocks, strict=True):
        assert len(prompt) // asked.block_tokens == blocks


@by_name
def test_layers_are_awaited_only_where_vllm_allows_it(asked: Questions) -> None:
    assert ASYNC in asked.modes
    assert (LAYERWISE in asked.modes) == (asked.engine.get("async_scheduling") is False)


@by_name
def test_host_memory_holds_all_blocks(asked: Questions) -> None:
    size = sum(asked.blocks) * asked.block_tokens * asked.model.kv_bytes_per_token
    assert size < asked.settings["cpu_cache_gb"] * (1 << 30)


@by_name
def test_requests_at_once_are_compared_where_rounding_changes_no_token(asked: Questions) -> None:
    assert asked.at_once == (asked.model.dtype == "float32")


def test_users_engines_and_large_slots_are_asked() -> None:
    first = ON_GPU[0]
    assert first.engine == {"extra_args": {"enforce_eager": False}}
    assert first.block_tokens * first.model.kv_bytes_per_token == 8 << 20
    assert {asked.model.kv_heads for asked in ON_GPU} >= {1, 2, 8}
    assert {asked.block_tokens for asked in ON_GPU} == {64, 256}


@pytest.fixture
def asked_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def compare(asked: Questions, folder: Path, log: Log) -> Iterator[Row]:
        names.append(asked.name)
        yield Row(asked.name, 0, "answers", None, "")

    monkeypatch.setattr(tokens, "compare", compare)
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: importlib.util))
    monkeypatch.setattr(tokens, "importlib", found)
    return names


def test_each_engine_is_a_unit(asked_names: list[str]) -> None:
    units: list[str] = []
    rows = list(token_rows(Log(frozenset({ON_GPU[0].name}), unit_done=units.append)))
    rest = [asked.name for asked in ON_GPU[1:]]
    assert [row.what for row in rows] == asked_names == units == rest


@pytest.mark.parametrize("may_fail", [True, False])
def test_an_engine_that_may_fail_is_a_note(
    asked_names: list[str], may_fail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(asked: Questions, folder: Path, log: Log) -> Iterator[Row]:
        raise EngineStartError("no kernel", "", [])

    monkeypatch.setattr(tokens, "compare", fail)
    only = tuple(asked for asked in ON_GPU if asked.may_fail is may_fail)[:1]
    monkeypatch.setattr(tokens, "ON_GPU", only)
    log = Log()
    if may_fail:
        assert list(token_rows(log)) == []
        assert log.notes[0].startswith(f"{only[0].name}: not measured: no kernel")
    else:
        with pytest.raises(EngineStartError):
            list(token_rows(log))


class TwoPasses:
    """An engine whose answers to all prompts at once are given: over its own cache, then loaded."""

    def __init__(self, *passes: list[Completion]) -> None:
        self._passes = list(passes)

    def generate_many(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Completion]:
        return self._passes.pop(0)

    def forget(self) -> None:
        pass


@pytest.mark.parametrize(
    ("own", "loaded", "value", "passed"),
    [(7, 7, 0, True), (7, 8, 2, False), (8, 8, 2, True)],
    ids=["equal", "only loaded ones differ", "rounding counts"],
)
def test_answers_at_once_have_a_goal_where_those_over_the_engines_own_cache_are_equal(
    own: int, loaded: int, value: int, passed: bool
) -> None:
    asked = Questions("x", ON_GPU[0].model, 64, (1, 2), at_once=True)

    def answers(token: int) -> list[Completion]:
        return [Completion([token], "length", 64 * blocks) for blocks in asked.blocks]

    engine: Any = TwoPasses(answers(own), answers(loaded))
    row = tokens._at_once(engine, asked, answers(7))
    assert (row.value, row.passed) == (value, passed)
    assert (row.goal is None) == (own != 7)
