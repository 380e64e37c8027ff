# SPDX-License-Identifier: Apache-2.0
"""Two ranks in processes of their own, which play rounds that a test asks for."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from sglang_world import write_weights

RANKS = 2
GLOO_SECONDS = 60.0
"""After which a rank that waits alone gives up, so that the test says so. On a busy machine the
other one may be late by many seconds."""
_PATIENCE_SECONDS = 3 * GLOO_SECONDS

PROCESSES = multiprocessing.get_context("forkserver")
"""Starts ranks. A fork of this process would keep the locks of threads of other tests for ever."""
PROCESSES.set_forkserver_preload(["torch.distributed", "flexkv_sglang.start"])

Serve = Callable[[int, Path, Connection], None]
"""Runs in a rank's process: its number, a folder for both, and a pipe with what to play."""


class Pair:
    """Two ranks."""

    def __init__(self, folder: Path, serve: Serve) -> None:
        folder.mkdir()
        write_weights(folder)
        pipes = [PROCESSES.Pipe() for _ in range(RANKS)]
        self._pipes = [ours for ours, _ in pipes]
        self._children = [
            PROCESSES.Process(target=serve, args=(rank, folder, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for child in self._children:
            child.start()
        for _, theirs in pipes:
            theirs.close()

    def play(self, faults: Mapping[int, Any]) -> list[Any]:
        """Play a round with these faults by rank; returns what each rank saw."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send(faults.get(rank))
        return [self._answer(rank) for rank in range(RANKS)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("close")
        assert [self._answer(rank) for rank in range(RANKS)] == ["closed"] * RANKS

    def kill(self) -> None:
        for child in self._children:
            child.kill()
            child.join()

    def _answer(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        assert pipe.poll(_PATIENCE_SECONDS), f"rank {rank} waits"
        return pipe.recv()


class Pairs:
    """One pair after the other, each until it has failed."""

    def __init__(self, folder: Path, serve: Serve) -> None:
        self._folder = folder
        self._serve = serve
        self._made = 0
        self._pair: Pair | None = None

    @contextmanager
    def pair(self, session: pytest.Session) -> Iterator[Pair]:
        """The present pair, which ends if a test fails meanwhile."""
        if self._pair is None:
            self._made += 1
            self._pair = Pair(self._folder / str(self._made), self._serve)
        failed = session.testsfailed
        yield self._pair
        if session.testsfailed > failed:
            self.forget()

    def forget(self) -> None:
        if self._pair is not None:
            self._pair.kill()
            self._pair = None
