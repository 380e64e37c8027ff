# SPDX-License-Identifier: Apache-2.0
"""A worker of vLLM that unmaps its KV pages, over the pages of a world."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_world import World

from flexkv.types.mover import Direction
from packages.late_mover import LateMover

worker: Any = pytest.importorskip(
    "vllm.v1.worker.gpu_worker", exc_type=ImportError, reason="needs vLLM's GPU build"
).Worker
"""vLLM's class, which FlexKV makes call it. A world stands for the worker that a method is called
on."""


def forget_pages_at_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give vLLM's worker pages that hold other bytes after a sleep. FlexKV replaces the methods
    when a world starts."""

    def sleep(self: World, level: int = 1) -> None:
        for rank in self.ranks:
            for tensor in rank.pages.values():
                tensor.fill_(0)

    def discard(self: World, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            sleep(self)

    monkeypatch.setattr(worker, "sleep", sleep)
    monkeypatch.setattr(worker, "wake_up", lambda self, tags=None: None)
    monkeypatch.setattr(worker, "discard", discard, raising=False)


def step_to_answer(world: World, prompt: list[int]) -> None:
    """Compute a request to its last token, and leave its stores under way."""
    world.slow_down(random.Random(4), polls=(50, 50))
    request_id = world.add(prompt)
    while not world.requests[request_id].is_finished():
        world.step()


def begun(late: list[LateMover], monkeypatch: pytest.MonkeyPatch) -> list[Direction]:
    """The directions of the copies that begin from now on."""
    directions: list[Direction] = []
    for mover in late:
        submit = mover.submit

        def record(direction: Direction, *args: Any, submit: Any = submit, **kwargs: Any) -> int:
            directions.append(direction)
            ticket: int = submit(direction, *args, **kwargs)
            return ticket

        monkeypatch.setattr(mover, "submit", record)
    return directions
