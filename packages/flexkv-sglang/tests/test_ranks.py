# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes get the numbers that the first one gives."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from rank_pairs import PROCESSES

from flexkv_sglang.ranks import CpuGroup, Ranks, ranks_of, together

PATIENCE_SECONDS = 60.0


def run(rank: int, store: Path, answers: Connection) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    ranks = ranks_of(torch.distributed.group.WORLD)
    assert isinstance(ranks, CpuGroup)
    first = ranks.agree([5, 1 << 62, -1], 3)
    second = ranks.agree([rank], 1)
    everywhere, here = ranks.all(True), ranks.all(rank == 0)
    errors = (
        ranks.first_error(None),
        ranks.first_error("no room" if rank == 1 else None),
        ranks.first_error(f"ä {rank}"),
        ranks.first_error("x" * 5000 if rank == 1 else None),
    )
    answers.send((ranks.rank, ranks.count, first, second, everywhere, here, errors))
    signal.pause()  # to leave before the other rank has its numbers could cut it off


def test_the_first_rank_speaks_for_all(tmp_path: Path) -> None:
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(2)]
    children = [
        PROCESSES.Process(target=run, args=(rank, tmp_path / "store", sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    try:
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(PATIENCE_SECONDS)
            errors = (None, (1, "no room"), (0, "ä 0"), (1, "x" * 2048))
            assert receiver.recv() == (rank, 2, [5, 1 << 62, -1], [0], True, False, errors)
    finally:
        for child in children:
            child.kill()
            child.join()


def test_an_engine_of_one_rank_asks_nobody() -> None:
    ranks = ranks_of(None)
    assert type(ranks) is Ranks
    assert ranks.agree([3, 4], 2) == [3, 4]
    assert [ranks.all(holds) for holds in (True, False)] == [True, False]
    assert [ranks.first_error(text) for text in (None, "no room")] == [None, (0, "no room")]


def test_an_error_of_one_rank_alone_goes_on_as_it_is() -> None:
    with pytest.raises(OSError, match="no room"), together(Ranks()):
        raise OSError("no room")
