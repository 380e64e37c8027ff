# SPDX-License-Identifier: Apache-2.0
"""The first stage of a pipeline decides and waits for no other one."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pairs import PROCESSES
from torch import distributed

from flexkv_sglang.ranks import Ranks, StagedRanks, ranks_of
from flexkv_sglang.stages import StageLinks

STAGES, RANKS = 2, 2
PATIENCE_SECONDS = 60.0
MESSAGES = 300


def play(number: int, store: Path, pipe: Connection) -> None:
    """A rank of a pipeline, as SGLang groups them."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=STAGES * RANKS
    )
    own = [distributed.new_group([s * RANKS + r for r in range(RANKS)]) for s in range(STAGES)]
    across = [distributed.new_group([s * RANKS + r for s in range(STAGES)]) for r in range(RANKS)]
    ranks = ranks_of(own[number // RANKS], across[number % RANKS])
    assert isinstance(ranks, StagedRanks)
    assert ranks.loads is not None
    errors = (
        ranks.first_error(None),
        ranks.first_error("no room" if number == 3 else None),
        ranks.first_error(f"ä {number}" if number in {1, 2} else None),
    )
    pipe.send((ranks.rank, ranks.count, ranks.stage, ranks.stages, errors))
    pipe.recv()
    agreed = []
    for message in range(MESSAGES):
        if message in {100, 200}:
            ranks.loads.links.step_begins()
        agreed.append(ranks.agree([message, -1, 1 << 62] if number == 0 else [9] * 3, 3))
    held = [ranks.all(True), ranks.all(number != 1), ranks.all(number != 2)]
    pipe.send((agreed, held))
    signal.pause()  # to leave before the other ranks have their numbers could cut them off


def test_later_stages_get_the_numbers_of_the_first_one_which_does_not_wait(tmp_path: Path) -> None:
    pipes = [PROCESSES.Pipe() for _ in range(STAGES * RANKS)]
    children = [
        PROCESSES.Process(target=play, args=(number, tmp_path / "store", theirs))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()

    def answer(number: int) -> Any:
        assert pipes[number][0].poll(PATIENCE_SECONDS)
        return pipes[number][0].recv()

    try:
        errors = (None, (3, "no room"), (1, "ä 1"))
        for number in range(STAGES * RANKS):
            assert answer(number) == (number, 4, number // RANKS, STAGES, errors)
        expected = [[message, -1, 1 << 62] for message in range(MESSAGES)]
        # The second stage has not begun when the first one has ended.
        for stage in (range(RANKS), range(RANKS, 2 * RANKS)):
            for number in stage:
                pipes[number][0].send("go")
            for number in stage:
                assert answer(number) == (expected, [True, False, True])
    finally:
        for child in children:
            child.kill()
            child.join()


def test_without_a_pipeline_there_is_one_stage() -> None:
    ranks = ranks_of(None, None)
    assert isinstance(ranks, Ranks)
    assert (ranks.stage, ranks.stages) == (0, 1)


def test_sent_messages_are_forgotten_after_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Work:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    monkeypatch.setattr(distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(distributed, "isend", lambda message, **_: Work(int(message[0])))
    links = StageLinks(object())
    for number in range(5):
        links.send(torch.tensor([number]).tolist(), 1, tag=7)
        links.step_begins()
    assert waited == [0, 1, 2]
