# SPDX-License-Identifier: Apache-2.0
"""Commands that end while engines are measured: the next one goes on with the next batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from integration.bench.rows import Row
from integration.gpu import goals, journal, serving, serving_batches
from integration.gpu.journal import Journal
from integration.gpu.results import Log
from integration.gpu.section import SECTIONS, log_for, write_rows
from integration.gpu.serving_batches import FLEXKV, NATIVE, NONE, QUICK, Workload
from integration.harness import connector
from integration.harness.answers import Completion, EngineStartError
from integration.harness.config import EngineConfig

LOAD = Workload(QUICK.model, prompt_tokens=100, new_tokens=2, batch=2, repeats=3)
CONTENDERS = {
    NONE: connector.NONE,
    FLEXKV: connector.plugin(),
    NATIVE: connector.native_offloading(1.0),
}
WARM_UP = 2
"""Batches that each engine answers before those that are measured."""


class TimeIsUp(BaseException):
    """In place of the signal that ends a section."""


class StandIn:
    """In place of the engines: remembers their prompts, and ends after some batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.batches = 0
        self.last = 1 << 30
        self.broken = ""
        monkeypatch.setattr(serving_batches, "Engine", self._start)
        monkeypatch.setattr(serving_batches, "write_config", lambda _, folder: folder)

    def _start(self, config: EngineConfig, log: Path) -> Answering:
        name = log.stem
        self.started.append(name)
        if name == self.broken:
            raise EngineStartError("no such connector", "", [])
        return Answering(self, config.connector is not connector.NONE)

    def asked(self) -> float:
        """A batch is asked; returns what its first token takes."""
        self.batches += 1
        if self.batches > self.last:
            raise TimeIsUp
        return 1.0 + self.batches


class Answering:
    """A running engine."""

    def __init__(self, owner: StandIn, caches: bool) -> None:
        self._owner, self._caches = owner, caches
        self._known: set[tuple[int, ...]] = set()

    def __enter__(self) -> Answering:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        if not self._caches:
            self._known.clear()

    def generate_many(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Completion]:
        first = self._owner.asked()
        answers = []
        for prompt in map(tuple, prompts):
            cached = len(prompt) if prompt in self._known else 0
            answers.append(Completion([1, 2], "length", cached, [first, first + 1]))
        self._known.update(map(tuple, prompts))
        return answers


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with closing(Journal(path)) as file:
        file.machine({"device": "NVIDIA H200"})
        file.begin("serving", quick=False)
    return path


def measured(log: Log, folder: Path) -> Iterator[Row]:
    return serving.rows(LOAD, serving_batches.measure(LOAD, CONTENDERS, folder, log))


def command(path: Path) -> bool:
    """One command, like those of `--resume`; whether it came to its end."""
    with closing(Journal(path)) as file:
        try:
            write_rows("serving", measured(log_for("serving", file), path.parent), file)
        except TimeIsUp:
            return False
    return True


def known(path: Path) -> journal.Progress:
    return journal.read([path], SECTIONS).sections["serving"]


def what(rows: Sequence[Row]) -> set[str]:
    return {row.what for row in rows}


def test_a_command_goes_on_with_the_next_engine(engines: StandIn, path: Path) -> None:
    engines.last = WARM_UP + 3 + WARM_UP + 6  # the third engine warms up
    assert not command(path)
    assert engines.started == [NONE, FLEXKV, NATIVE]
    assert known(path).units == {NONE, FLEXKV}
    shown = {row.goal for row in known(path).outcome.rows}
    assert {goals.WARM_TTFT, goals.WARM_RATE} <= shown
    assert goals.PEER_TTFT not in shown
    engines.last += 1000
    assert command(path)
    assert engines.started == [NONE, FLEXKV, NATIVE, NATIVE]
    assert known(path).units == {NONE, FLEXKV, NATIVE}
    assert {goals.PEER_TTFT, goals.PEER_RATE} <= {row.goal for row in known(path).outcome.rows}


@pytest.mark.parametrize("batches", [1, WARM_UP + 2, WARM_UP + 3 + WARM_UP + 5])
def test_a_command_goes_on_within_an_engine(
    engines: StandIn, path: Path, batches: int, tmp_path: Path
) -> None:
    """The last of these is cut between the new and the seen prompts of a batch."""
    engines.last = batches
    assert not command(path)
    first, started = engines.batches, len(engines.started)
    kept = known(path).kept
    engines.last += 1000
    assert command(path)
    progress = known(path)
    assert {name: progress.kept[name] for name in kept} == kept
    left = 3 + 6 + 6 - sum(len(taken) for taken in kept.values())
    assert engines.batches - first == WARM_UP * (len(engines.started) - started) + left
    rows = progress.outcome.rows
    whole = list(measured(Log(), tmp_path))
    assert what(rows) == what(whole)
    assert len(rows) == len(whole)


def test_rows_are_made_of_batches_of_both_commands(engines: StandIn, path: Path) -> None:
    engines.last = WARM_UP + 2
    assert not command(path)
    engines.last += 1000
    assert command(path)
    (row,) = [row for row in known(path).outcome.rows if row.what.startswith(f"TTFT of {NONE}")]
    # Two batches of the first command, and the one after the warm-up of the second.
    begins = [WARM_UP + 1, WARM_UP + 2, WARM_UP + 3 + WARM_UP + 1]
    assert row.samples == {"samples": [1e3 * (1.0 + number) for number in begins]}


def test_batches_that_are_all_kept_start_no_engine(engines: StandIn, path: Path) -> None:
    with closing(Journal(path)) as file:
        rows = measured(log_for("serving", file), path.parent)
        next(rows)
        rows.close()  # type: ignore[attr-defined]  # cut before the unit was finished
    assert known(path).units == set()
    assert command(path)
    assert engines.started == [NONE, FLEXKV, NATIVE]


def test_a_peer_that_fails_is_left_out_once(engines: StandIn, path: Path) -> None:
    engines.broken = NATIVE
    assert command(path)
    assert NATIVE in known(path).units
    assert [note.partition(":")[0] for note in known(path).outcome.notes] == [f"no {NATIVE}"]


def test_our_own_engine_that_fails_is_an_error(engines: StandIn, path: Path) -> None:
    engines.broken = FLEXKV
    with pytest.raises(EngineStartError, match="no such connector"):
        command(path)
    assert known(path).units == {NONE}


def test_a_prompt_that_was_to_be_cached_and_was_not_is_no_batch(
    engines: StandIn, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(self: Any) -> None:
        self._known.clear()

    monkeypatch.setattr(Answering, "reset_prefix_cache", forget)
    with pytest.raises(RuntimeError, match="0 of 100 tokens were cached, where 90% were to be"):
        command(path)
    assert {name.partition(",")[0] for name in known(path).kept} == {NONE}
