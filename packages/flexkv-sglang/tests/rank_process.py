# SPDX-License-Identifier: Apache-2.0
"""A rank in a process of its own, that talks to the other one by gloo as SGLang's ranks do, and in
which one call can go wrong."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rank_lines import line_errors
from rank_pairs import GLOO_SECONDS, RANKS
from sglang_requests import Grammars
from sglang_requests import Request as ScheduledRequest
from sglang_world import LAYERS, PATIENCE_SECONDS, HashedPrompt, Rank, hashes_of, same
from torch import distributed

from flexkv_sglang import hooks
from flexkv_sglang.ranks import ranks_of
from flexkv_sglang.side import RankSide
from packages.inside import cache_of
from packages.inside_adapters import serve_side
from packages.line_errors import Line

_PAGES = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """A call that raises once.

    Attributes:
        stage: of a round, "store", "schedule" or "load": the first such call in it raises.
        owner: whose call, by a path from the side, "request" or "tree".
        call: its name.
    """

    stage: str
    owner: str
    call: str


@dataclass(frozen=True, slots=True)
class AnyLine:
    """An error before one line.

    Attributes:
        spared: lines that do not fail.
    """

    spared: frozenset[Line]


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank saw of a round.

    Attributes:
        stored: what SGLang was told of an offload.
        found: pages that all ranks can load.
        loaded: whether SGLang may use them.
        right: whether they hold what was stored.
        raised: whether the fault happened.
        under_way: transfers of the cache that have not ended, though all is done.
        failures: errors that guards have caught.
        hit: the lines that have failed in this process.
        disabled: whether the cache has stopped for good.
    """

    stored: bool
    found: int
    loaded: bool
    right: bool
    raised: bool
    under_way: int
    failures: int
    hit: tuple[Line, ...] = ()
    disabled: bool = False


class InjectedError(Exception):
    """Nobody expects it."""


class Request(ScheduledRequest):
    """A request in SGLang's queue."""

    def __init__(self, rid: str, hashes: Sequence[str], side: RankSide) -> None:
        super().__init__(rid, [0] * 4 * len(hashes))
        self.found = 0
        self.hashes = hashes
        self._side = side

    def init_next_round_input(self, tree_cache: object, cow_mamba: bool = False) -> None:
        """Ask all ranks for the longest prefix that all have, as SGLang does."""
        lengths: list[int] = []
        hooks.match(lambda *_: None, None, None, self, SimpleNamespace(device_prefix_len=0))
        with self._side.boundary.guard("lookup", "it is a miss"):  # as the linker does
            lengths = self._side.lookup(self.rid, self.hashes)
        self.found = hooks.agree_on_prefix(_alone, self, lengths)

    def matched(self) -> HashedPrompt:
        """The pages that SGLang's own cache lacks: all."""
        return HashedPrompt(self.hashes)


def _alone(*_: object) -> int:
    raise AssertionError("FlexKV's ranks agree by themselves")


class Tree:
    """Of SGLang's tree what `hooks.offload` asks for."""

    @property
    def tree_core(self) -> Tree:
        return self

    def collect_path_info(self, nodes: Sequence[object]) -> tuple[tuple[Any, ...], ...]:
        return tuple((SimpleNamespace(parent_id=1),) for _ in nodes)

    def get_last_hash_value(self, node: int) -> str | None:
        return None

    def prefetch_anchor_info(self, node: object) -> tuple[str | None, str | None]:
        return None, None


class Process:
    """One rank, and the rounds that it plays.

    Args:
        rank: of `RANKS`.
        folder: for both.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=GLOO_SECONDS),
        )
        settings = {
            "ssd_cache_gb": 1 / 64,
            "ssd_cache_dir": (str(folder / "disk"),),
            "ssd_timeout_seconds": PATIENCE_SECONDS,  # a busy disk is no fault
            "always_load": True,
        }
        group = ranks_of(distributed.group.WORLD)
        self._rank = Rank(folder, heads=RANKS, ranks=group, pool_heads=1, settings=settings)
        self._number = rank
        self._side = self._rank.side
        self._tree = Tree()
        serve_side(self._side)
        hooks.missing_pages = lambda tree, request, **_: request.matched()  # type: ignore[assignment]
        self._errors = line_errors(random.Random(rank), setattr)
        self._rounds = 0
        self._raised = False

    def play(self, fault: Fault | AnyLine | None) -> Round:
        """Store pages, schedule a request that needs them and one that needs others, load."""
        if not isinstance(fault, AnyLine):
            return self._play(fault)
        before = len(self._errors.hit)
        self._errors.spare(fault.spared)
        self._errors.arm()
        try:
            played = self._play(None)
        finally:
            self._errors.disarm()
        hit = tuple(self._errors.hit)
        return replace(played, raised=len(hit) > before, hit=hit)

    def _play(self, fault: Fault | None) -> Round:
        self._rounds += 1
        self._raised = False
        before = self._side.boundary.failures.total()
        hashes = hashes_of(f"round {self._rounds}", _PAGES)
        wanted = self._rank.fill([1, 2, 3], seed=10 * self._rounds + self._number)
        self._arm(fault, "store")
        stored = self._store(hashes)
        others = hashes_of(f"others {self._rounds}", _PAGES)
        queue = [
            Request(f"a {self._rounds}", hashes, self._side),
            Request(f"b {self._rounds}", others, self._side),
        ]
        found, loaded, right = 0, False, False
        while queue:  # as long as one waits for the disk
            self._arm(fault, "schedule", queue[0])
            for request in self._schedule(queue):
                if request.found:
                    self._arm(fault, "load", request)
                    found = request.found
                    loaded = self._load(request, [7, 8, 9])
                    right = same(self._rank.read([7, 8, 9]), wanted)
        self._errors.disarm()
        cache = cache_of(self._side)
        # After an error, the cache stores nothing until it has recovered.
        while not self._least(int(cache is None or not cache.busy)):
            self._side.ended_offloads()
        left = 0 if cache is None else len(cache.status.under_way)
        failures = self._side.boundary.failures.total() - before
        disabled = cache is not None and cache.status.disabled
        return Round(stored, found, loaded, right, self._raised, left, failures, disabled=disabled)

    def close(self) -> None:
        self._rank.close()

    def _store(self, hashes: Sequence[str]) -> bool:
        def offload(wrapper: object, node: object, transfers: object) -> None:
            self._side.offload(hashes, lambda: [1, 2, 3])

        hooks.offload(offload, SimpleNamespace(cache=self._tree), object(), None)
        while not self._least(self._side.ended_offloads()):
            time.sleep(0.001)
        return bool(self._least(int(self._side.take_offload())))

    def _schedule(self, queue: list[Request]) -> list[Request]:
        """Those that SGLang is let see, which leave the queue."""

        def take_all(scheduler: Any) -> tuple[Any, None]:
            seen: list[Request] = list(scheduler.waiting_queue)
            for request in seen:
                request.init_next_round_input(None)
            scheduler.waiting_queue = []
            return SimpleNamespace(reqs=seen), None

        scheduler = SimpleNamespace(
            waiting_queue=queue, grammar_manager=Grammars(), tree_cache=None, device="cpu"
        )
        batch, _ = hooks.schedule(take_all, scheduler)
        queue[:] = scheduler.waiting_queue
        self._least(self._side.ended_offloads())
        taken: list[Request] = batch.reqs
        return taken

    def _load(self, request: Request, pages: Sequence[int]) -> bool:
        if not self._side.load(request.rid, request.hashes[: request.found], pages):
            return False
        self._side.start_batch()
        for layer in range(LAYERS):
            self._side.wait_for_layer(layer)
        return bool(self._least(int(self._side.finish_batch())))

    def _least(self, number: int) -> int:
        """Of all ranks, as SGLang agrees on it."""
        message = torch.tensor([number])
        distributed.all_reduce(message, distributed.ReduceOp.MIN)
        return int(message)

    def _arm(self, fault: Fault | None, stage: str, request: Request | None = None) -> None:
        """Have the fault's call raise once, if it is time."""
        if fault is None or fault.stage != stage or self._raised:
            return
        owner: Any = {"request": request, "tree": self._tree}.get(fault.owner, self._side)
        if owner is self._side:
            for name in filter(None, fault.owner.split(".")):
                owner = getattr(owner, name)
        kind, inner = type(owner), getattr(type(owner), fault.call)

        def fail(*_: object, **__: object) -> None:
            setattr(kind, fault.call, inner)
            self._raised = True
            raise InjectedError(fault)

        setattr(kind, fault.call, fail)


def serve(rank: int, folder: Path, pipe: Connection) -> None:
    """Play the rounds that come by `pipe`: a `Fault` or None each, answered by a `Round`."""
    process = Process(rank, folder)
    play: Callable[[Fault | None], Round] = process.play
    while True:
        asked = pipe.recv()
        if asked == "close":
            break
        pipe.send(play(asked))
    process.close()
    pipe.send("closed")
