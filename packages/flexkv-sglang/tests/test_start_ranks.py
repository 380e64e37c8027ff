# SPDX-License-Identifier: Apache-2.0
"""A start that fails on one rank fails on all, with that rank's error, and none waits.

Two processes joined by gloo start as SGLang's ranks do. A rank that left the start alone would make
the other one wait in its next exchange.
"""

from __future__ import annotations

import datetime
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from rank_pairs import GLOO_SECONDS, PROCESSES, RANKS
from sglang_world import Rank, write_weights
from torch import distributed

from flexkv.types.errors import RankError
from flexkv_sglang import start
from flexkv_sglang.ranks import ranks_of

CASES = [
    *[(rank, call) for rank in range(RANKS) for call in ("model_identity", "device_of")],
    *[(rank, call) for rank in range(RANKS) for call in ("make_chooser", "RankSide")],
    (0, "make_cache"),
    (0, "make_recorder"),
]
"""A rank, and what raises on it alone."""


class DiskFullError(OSError):
    """Nobody expects it at this place."""


def run(rank: int, folder: Path, failing: int, call: str, answers: Connection) -> None:
    """Start a rank, of which one fails; then start it again. Sends how the first start ended, and
    whether the second one stores pages."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=GLOO_SECONDS),
    )
    inner = getattr(start, call)

    def fail(*_: object, **__: object) -> None:
        setattr(start, call, inner)
        raise DiskFullError("no room for this rank")

    if rank == failing:
        setattr(start, call, fail)
    group = ranks_of(distributed.group.WORLD)
    settings = {"ssd_cache_gb": 1 / 64, "ssd_cache_dir": (str(folder / "disk"),)}
    try:
        Rank(folder, heads=RANKS, ranks=group, pool_heads=1, settings=settings).close()
        ended = "started"
    except (DiskFullError, RankError) as error:
        ended = f"{type(error).__name__}: {error}"
    answers.send(ended)
    again = Rank(folder, heads=RANKS, ranks=group, pool_heads=1, settings=settings)
    again.fill([1], seed=rank)
    answers.send(again.store(["00" * 32], [1]))
    again.close()
    answers.send("closed")


@pytest.mark.parametrize(("failing", "call"), CASES)
def test_a_start_that_fails_on_one_rank_fails_on_all(
    tmp_path: Path, failing: int, call: str
) -> None:
    write_weights(tmp_path)
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(RANKS)]
    children = [
        PROCESSES.Process(target=run, args=(rank, tmp_path, failing, call, sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    told = f"RankError: rank {failing} of the engine cannot start: no room for this rank"
    try:
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(GLOO_SECONDS / 2), f"rank {rank} waits"
            own = "DiskFullError: no room for this rank"
            assert receiver.recv() == (own if rank == failing else told)
        for receiver, _ in pipes:
            assert receiver.poll(GLOO_SECONDS), "a second start waits"
            assert receiver.recv() is True
    finally:
        for child in children:
            child.kill()
            child.join()
