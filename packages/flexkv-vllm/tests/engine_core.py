# SPDX-License-Identifier: Apache-2.0
"""vLLM's own engine core around the scheduler of a world, for pauses and sleeps. Its workers do
what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from engine_world import World
from vllm.v1.engine.core import EngineCoreProc


class Executor:
    """vLLM's executor, whose workers do `effect` when they are called."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.effect: Callable[[], None] = lambda: None

    @property
    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def sleep(self, level: int) -> None:
        self.asleep = {"weights", "kv_cache"}

    def discard(self, tags: Iterable[str]) -> None:
        self.asleep |= set(tags)

    def wake_up(self, tags: list[str] | None) -> None:
        self.asleep -= set(tags or self.asleep)

    def collective_rpc(self, method: object, *_: object) -> None:
        if method != "synchronize_device":
            self.effect()

    def reset_mm_cache(self) -> None:
        """There is none."""

    def reset_encoder_cache(self) -> None:
        """There is none."""


def core_of(world: World, kind: type[Any] = EngineCoreProc) -> Any:
    """vLLM's engine core around the scheduler of `world`."""
    core = kind.__new__(kind)
    core.scheduler, core.model_executor = world.scheduler, Executor()
    core.mm_receiver_cache = core.batch_queue = None
    core.engines_running = False
    core._idle_state_callbacks = []
    core.world = world
    return core


def pause(core: Any, begin: Callable[..., Any], *args: object) -> None:
    """Begin a pause or a sleep, and step until vLLM has completed it."""
    begin(*args)
    while not core._pause_complete():
        core.world.step()
    for complete in core._idle_state_callbacks:
        complete(core)
    core._idle_state_callbacks.clear()


def sleep_and_wake(core: Any) -> None:
    pause(core, core.sleep, 1)
    core.wake_up()
