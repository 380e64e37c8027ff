# SPDX-License-Identifier: Apache-2.0
"""Where an unexpected error ends instead of ending SGLang, nothing is wrong afterwards: every guard
of a rank's side is hit, before each of its statements."""

from __future__ import annotations

import ast
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from sglang_world import PATIENCE_SECONDS, Rank, hashes_of, same

from flexkv.host.board import CELLS
from flexkv_sglang import side as guarded_module
from packages.tier_blocks import assert_no_slot_is_lost, ready_blocks, writing_blocks

FILE = Path(guarded_module.__file__)
SLOT_BYTES = 4096
SLOTS = 20
ROUNDS = 12
DISABLES = "disabling the cache"
"""Reached after many errors only; see `test_lasting_errors`."""
LOST = "cancelling a load"
"""A load that cannot be cancelled keeps its blocks, as its guard says."""


class InjectedError(Exception):
    """Nobody expects it."""


def all_guarded() -> Iterator[tuple[str, int]]:
    """The place of every guard in the file, with each line on which a statement of it begins."""
    for node in ast.walk(ast.parse(FILE.read_text())):
        if not isinstance(node, ast.With):
            continue
        call = node.items[0].context_expr
        if isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "guard":
            inner = [each for statement in node.body for each in ast.walk(statement)]
            lines = {each.lineno for each in inner if isinstance(each, ast.stmt)}
            place = ast.literal_eval(call.args[0])
            yield from ((place, line) for line in sorted(lines) if place != DISABLES)


GUARDED = list(all_guarded())


@dataclass(slots=True)
class Engine:
    """What SGLang does with a rank: it stores prompts of three pages, and loads some of them.

    Attributes:
        rank: with little host memory, over a disk.
        line: on which an error is raised, once.
        hit: whether that has happened.
    """

    rank: Rank
    line: int
    hit: bool = False
    prompts: list[list[torch.Tensor]] = field(default_factory=list)

    def play(self, rng: random.Random) -> None:
        """Store another prompt, and load one of those stored so far, as far as it is found."""
        number, side = len(self.prompts), self.rank.side
        self.prompts.append(self.rank.fill([1, 2, 3], seed=number))
        self._call(self.rank.store, hashes_of(f"prompt {number}", 3), [1, 2, 3])
        wanted, rid = rng.randrange(number + 1), f"request {number}"
        hashes = hashes_of(f"prompt {wanted}", 3)
        self._call(self.rank.look_ahead, rid, hashes)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(self._call(side.held, [rid])):
            assert time.monotonic() < deadline
            self._call(side.ended_offloads)
        found = sum(self._call(side.lookup, rid, hashes))  # one length, or none
        if found and number % 4 == 1:
            self._call(side.load, rid, hashes[:found], [7, 8, 9][:found])
            self._call(side.cancel, rid)
        if found:
            self.rank.fill([7, 8, 9], seed=-number - 1)
            if self._call(self.rank.load, rid, hashes[:found], [7, 8, 9][:found]):
                loaded = self.rank.read([7, 8, 9][:found])
                assert same(loaded, [pages[:found] for pages in self.prompts[wanted]])
        side.held([])
        if number == ROUNDS // 2:
            self._call(side.reset)
        if number == ROUNDS - 1:
            self._call(partial(side.weights_changed, flushed=True))
            self._call(side.clear)

    def assert_at_rest(self, place: str) -> None:
        """Nothing is kept for any request: no cell, lease, reserved slot or fetch."""
        cache: Any = self.rank.side._cache
        if place == LOST:
            return
        deadline = time.monotonic() + PATIENCE_SECONDS
        while cache.busy:
            assert time.monotonic() < deadline
            cache.poll()
        index, fetcher = cache._index, cache._below.fetcher
        assert sorted(cache._device._board._free) == list(range(CELLS))
        assert [block.key for block in ready_blocks(index).values() if block.leases] == []
        assert writing_blocks(index) == {}
        assert_no_slot_is_lost(index)
        assert fetcher._fetches == fetcher._waiting == {}

    def leave(self) -> None:
        self._call(self.rank.close)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call `method`, which may raise nothing, while the error is to come."""
        # Python ends tracing with an error that the tracing raised.
        sys.settrace(None if self.hit else self._enter)
        try:
            return method(*args)
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._at if frame.f_code.co_filename == str(FILE) else None

    def _at(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line" and frame.f_lineno == self.line and not self.hit:
            self.hit = True
            raise InjectedError(f"line {self.line}")
        return self._at


@pytest.mark.parametrize(
    ("place", "line"), GUARDED, ids=[f"{place}, line {line}" for place, line in GUARDED]
)
def test_after_an_error_all_is_as_without_flexkv(
    make_rank: Callable[..., Rank], tmp_path: Path, place: str, line: int
) -> None:
    settings = {
        "always_load": True,
        "cpu_cache_gb": SLOTS * SLOT_BYTES / (1 << 30),
        "ssd_cache_gb": 1 / 64,
        "ssd_cache_dir": (str(tmp_path / "disk"),),
        "ssd_timeout_seconds": PATIENCE_SECONDS,
    }
    engine = Engine(make_rank(settings=settings), line)
    engine.rank.side.watch()
    rng = random.Random(1)
    for _ in itertools.repeat(None, ROUNDS):
        engine.play(rng)
    engine.assert_at_rest(place)
    engine.leave()
    assert engine.hit
