# SPDX-License-Identifier: Apache-2.0
"""An error before each line that FlexKV executes for a rank of SGLang: none reaches SGLang, no page
gets a wrong byte, and afterwards no lease, copy, fetch, request or offload waits."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from page_subscriber import pages_of
from rank_lines import line_errors
from sglang_requests import Grammars
from sglang_world import (
    LAYERS,
    PATIENCE_SECONDS,
    HashedPrompt,
    Rank,
    hashes_of,
    make_windowed,
    make_with_states,
    same,
)

from flexkv.host.board import CELLS
from flexkv_sglang import hooks
from flexkv_sglang.events import Page
from flexkv_sglang.side import RankSide
from packages.inside import (
    assert_no_fetch,
    assert_no_lease,
    assert_no_write,
    board_of,
    cache_of,
    free_cells,
    index_of,
)
from packages.inside_adapters import pending_offloads, queued_loads
from packages.line_errors import SHARE, LineErrors
from packages.tier_blocks import assert_no_slot_is_lost

PAGES = 3
ROUNDS = 12
ENGINES = math.inf if SHARE == 1 else 3
"""The most engines of a test."""


class Engine:
    """What SGLang does with a rank: it stores prompts of three pages and loads some of them.

    Args:
        rank: with little host memory, over a disk.
        errors: of its calls.
        rng: chooses the prompts.
        windows: pages of a window; 0 if the model has none.
        states: whether the model has recurrent states.
    """

    def __init__(
        self, rank: Rank, errors: LineErrors, rng: random.Random, windows: int, *, states: bool
    ) -> None:
        self.rank = rank
        self._windows = windows
        self._states = int(states)
        self._in_windows: list[list[torch.Tensor]] = []
        self._in_states: list[list[torch.Tensor]] = []
        self.side: RankSide = rank.side
        self._errors = errors
        self._rng = rng
        self._prompts: list[list[torch.Tensor]] = []
        self._epoch = 0
        core = SimpleNamespace(
            prefetch_anchor_info=lambda _: (None, None),
            take_events=self._take_events,
            collect_path_info=lambda nodes: ((SimpleNamespace(parent_id=1),),),
            get_last_hash_value=lambda _: None,
        )
        self._tree = SimpleNamespace(tree_core=core)

    def round(self) -> None:
        """Store another prompt, and load one of those stored so far as far as it is found."""
        number = len(self._prompts)
        self._store(number)
        for rid in (f"{number} a", f"{number} b"):
            wanted = self._rng.randrange(number + 1)
            self._serve(rid, self._hashes(wanted), wanted, cancels=number % 4 == 1)
        if number % 6 == 3:
            self._call(self.side.reset)
        if number % 6 == 5:
            self._call(self.side.weights_changed, flushed=True)
            self._epoch += 1

    def settle(self) -> None:
        """SGLang has nothing more to do: it steps until nothing is under way."""
        cache: Any = cache_of(self.side)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while cache.busy or self.side.ended_offloads() != len(pending_offloads(self.side)):
            assert time.monotonic() < deadline, "something is under way"
            self.side.held([])
            self.side.ended_offloads()
        while pending_offloads(self.side):
            self.side.take_offload()
        assert queued_loads(self.side) == {}
        assert sorted(free_cells(board_of(cache))) == list(range(CELLS))
        assert_no_lease(cache)
        assert_no_fetch(cache)
        assert_no_write(cache)
        assert_no_slot_is_lost(index_of(cache))

    def close(self) -> None:
        self._call(self.rank.close)

    def _hashes(self, number: int) -> list[str]:
        return hashes_of(self._name(number), PAGES)

    def _name(self, number: int) -> str:
        return f"prompt {number} of {self._epoch}"

    def _take_events(self) -> list[Page]:
        """SGLang's events about the prompt that it has stored last."""
        return pages_of(self._name(len(self._prompts) - 1), PAGES)

    def _store(self, number: int) -> None:
        self._prompts.append(self.rank.fill([1, 2, 3], seed=number))
        windows = [6, 5][: self._windows]
        self._in_windows.append(self.rank.fill(windows, seed=1 << 20 | number, windows=True))
        states = [1][: self._states]
        self._in_states.append(self.rank.fill_states(states, seed=number))
        blocks, last = self.rank.blocks([1, 2, 3], windows, states), self.rank.last(windows, states)
        hashes = self._hashes(number)
        self._call(
            hooks.offload,
            lambda *_: self.side.offload(hashes, lambda: blocks, last=last),
            SimpleNamespace(cache=self._tree),
            object(),
            None,
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._call(self.side.ended_offloads):
            assert time.monotonic() < deadline
        self._call(self.side.take_offload)
        self._call(self._report)
        if self.side.events is not None:
            self._call(hooks.take_events, lambda _: [], SimpleNamespace(page_size=4))

    def _serve(self, rid: str, hashes: list[str], number: int, *, cancels: bool) -> None:
        request = SimpleNamespace(
            rid=rid,
            hashes=hashes,
            origin_input_ids=list(range(4 * PAGES + 1)),
            output_ids=[7],
            session=None,
            session_id=None,
            extra_key=None,
            cache_salt=None,
            sampling_params=SimpleNamespace(custom_params=None),
            prefix_len=0,
            extend_end=4,
            is_retracted=False,
            finished=lambda: True,
        )
        scheduler = SimpleNamespace(
            waiting_queue=[request],
            grammar_manager=Grammars(),
            tree_cache=self._tree,
            device="cpu",
            last_batch=None,
        )

        def take_all(scheduler: Any) -> tuple[Any, Any]:
            taken, scheduler.waiting_queue = scheduler.waiting_queue, []
            batch = SimpleNamespace(reqs=taken) if taken else None
            return batch, SimpleNamespace(is_empty=lambda: True)

        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._call(hooks.schedule, take_all, scheduler)[0] is None:
            assert time.monotonic() < deadline
            self._call(self.side.ended_offloads)
        lengths = self._call(self.side.lookup, rid, hashes)
        found = self._call(hooks.agree_on_prefix, None, None, lengths)
        if not found:
            return
        pages, hashes = [7, 8, 9][:found], hashes[:found]
        windows = [2, 3][: min(found, self._windows)]
        states = [2][: self._states]
        blocks, last = self.rank.blocks(pages, windows, states), self.rank.last(windows, states)
        if cancels and self._call(self.side.load, rid, hashes, blocks, last):
            self._call(self.side.cancel, rid)
        self.rank.fill(pages, seed=-1 - len(self._prompts))
        self.rank.fill(windows, seed=-1 - len(self._prompts), windows=True)
        self.rank.fill_states(states, seed=-1 - len(self._prompts))
        if self._call(self.rank.load, rid, hashes, pages, windows, states):
            wanted = self._prompts[number]
            assert same(self.rank.read(pages), [tensor[:found] for tensor in wanted])
            if windows:
                # The window before the end of all pages; there is none before an earlier end.
                assert found == PAGES
                assert same(self.rank.read(windows, windows=True), self._in_windows[number])
            if states:
                assert found == PAGES
                assert same(self.rank.read_states(states), self._in_states[number])

    def _report(self) -> None:
        with self.side.boundary.guard("counting", "the counts are lost"):  # as `Metrics` does
            if self.side.has_samples:
                self.side.take_samples()

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `method`, which may raise nothing, while an error is to come."""
        self._errors.arm()
        try:
            return method(*args, **kwargs)
        finally:
            self._errors.disarm()


@pytest.mark.parametrize(
    "kind",
    [("lru", 0, False), ("auto", 0, False), ("lru", 2, False), ("lru", 0, True)],
    ids=["lru", "auto", "with windows", "with states"],
)
def test_an_error_before_any_line_loses_nothing(
    make_rank: Callable[..., Rank],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[str, int, bool],
) -> None:
    """`kind`: the eviction policy, the pages of a window, and whether there are states."""
    policy, windows, states = kind
    rng = random.Random(1)
    errors = line_errors(rng, monkeypatch.setattr)
    monkeypatch.setattr(
        hooks, "missing_pages", lambda tree, request, **_: HashedPrompt(request.hashes)
    )
    monkeypatch.setattr(hooks, "learn_early", lambda events, ours: ours.learn(events, (), False))
    monkeypatch.setattr(hooks, "follow", lambda events, ours, size: [*events, *ours.take()])
    made = itertools.count()
    new = 1
    while new and next(made) < ENGINES:
        before = len(errors.hit)
        pool = make_windowed(layers=2 * LAYERS) if windows else None
        rank = make_rank(
            pool=make_with_states(layers=1) if states else pool,
            window=4 * windows,
            settings={
                "always_load": True,
                "cpu_cache_gb": 20 * 4096 / (1 << 30),
                "ssd_cache_gb": 1 / 64,
                "ssd_cache_dir": (str(tmp_path / "disk"),),
                "ssd_timeout_seconds": PATIENCE_SECONDS,
                "eviction_policy": policy,
                "trace": str(tmp_path / "trace"),
            },
        )
        rank.side.watch()
        monkeypatch.setattr(hooks, "_side", rank.side)
        engine = Engine(rank, errors, rng, windows, states=states)
        try:
            hits = -1
            while hits < len(errors.hit):
                hits = len(errors.hit)
                for _ in range(ROUNDS):
                    engine.round()
                engine.settle()
            engine.close()
        except BaseException as error:
            error.add_note(f"after errors before {named(errors, before)}")
            raise
        new = len(errors.hit) - before
    assert len(errors.hit) > 40


def named(errors: LineErrors, start: int) -> list[str]:
    return [f"{Path(file).name}:{line}" for file, line in errors.hit[start:]]
