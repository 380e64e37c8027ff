# SPDX-License-Identifier: Apache-2.0
"""Errors in the statements that a guard of the boundary encloses, each raised once."""

from __future__ import annotations

import ast
import functools
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from engine_world import World
from traffic import Traffic, make_stems

import flexkv
import flexkv_vllm

SOURCES = [Path(package.__path__[0]) for package in (flexkv, flexkv_vllm)]


class InjectedError(Exception):
    """Nobody expects it."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a guard encloses.

    Attributes:
        path: of the file.
        place: as the guard names it, as Python source.
        lines: on which its statements begin.
    """

    path: Path
    place: str
    lines: frozenset[int]

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}: {self.place}"


def all_guarded(*, offloading: bool) -> list[Guarded]:
    """Every guard in the code: of the offloading spec, or of all else."""
    return [
        guarded
        for source in SOURCES
        for path in sorted(source.rglob("*.py"))
        if (path.parent.name == "offloading") == offloading
        for guarded in _guarded_in(path)
    ]


@functools.cache
def _guarded_in(path: Path) -> list[Guarded]:
    text = path.read_text()
    if "guard" not in text:  # most files: parsing them takes seconds
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.With):
            continue
        call = node.items[0].context_expr
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "guard"):
            continue
        inner = [each for statement in node.body for each in ast.walk(statement)]
        lines = frozenset(each.lineno for each in inner if isinstance(each, ast.stmt))
        found.append(Guarded(path, ast.unparse(call.args[0]), lines))
    return found


class Injection:
    """Raises an `InjectedError` before each statement of a guard, once for each.

    Python ends tracing with an error that the tracing raised: call `arm` again and again, in the
    thread that is to be hit.

    Attributes:
        left: lines that were not hit yet.
    """

    def __init__(self, guarded: Guarded) -> None:
        self._file = str(guarded.path)
        self.left = set(guarded.lines)

    def arm(self) -> None:
        sys.settrace(self._enter if self.left else None)
        threading.settrace(self._enter)

    def disarm(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._at if frame.f_code.co_filename == self._file else None

    def _at(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line" and frame.f_lineno in self.left:
            self.left.remove(frame.f_lineno)
            raise InjectedError(f"line {frame.f_lineno}")
        return self._at


_LIVES = 60
"""Worlds at most for one guard: after some errors FlexKV does nothing more in a process. Three are
the most that any guard has needed, with threads switched between 10 us and 50 ms."""

_BESIDE_TRAFFIC = {"shutdown", "measuring copies"}
"""Places that a world is at only when it begins and ends."""

_PATIENCE = 4
"""Rounds of traffic in which nothing is hit before another world is made."""


def _run(world: World, rng: random.Random, injection: Injection, **options: Any) -> None:
    """Traffic until all is hit, or it is clear that what is left will not be."""
    step = world.step

    def armed_step() -> None:
        injection.arm()
        step()

    world.step = armed_step  # type: ignore[method-assign]
    traffic = Traffic(world, rng, make_stems(rng, 4), disturb=injection.arm, **options)
    idle = 0
    while injection.left and idle < _PATIENCE:
        before = len(injection.left)
        traffic.run(12, until=[])
        injection.disarm()
        world.settle()
        idle = 0 if len(injection.left) < before else idle + 1


def hit_all(
    guarded: Guarded, make: Callable[[], World], rng: random.Random, **options: Any
) -> None:
    """Let every statement fail once; what goes on after it is checked as in all worlds."""
    injection = Injection(guarded)
    try:
        for _ in range(_LIVES):
            injection.arm()
            world = make()
            if guarded.place.strip("'") not in _BESIDE_TRAFFIC:
                _run(world, rng, injection, **options)
            injection.arm()
            world.close()
            if not injection.left:
                return
    finally:
        injection.disarm()
    pytest.fail(f"not reached: lines {sorted(injection.left)}")
