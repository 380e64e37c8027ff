# SPDX-License-Identifier: Apache-2.0
"""Two ranks in two processes, with SGLang's own tree and exchanges. What goes wrong in one call on
one rank alone leaves no rank waiting, loads no wrong bytes, and keeps no page."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pairs import GLOO_SECONDS, RANKS, Pair, Pairs  # type: ignore[import-not-found]
from sglang_world import PATIENCE_SECONDS, same  # type: ignore[import-not-found]
from torch import distributed

from flexkv_sglang.ranks import ranks_of
from integration.sglang.with_sglang.linked import PAGE, LinkedRank


@dataclass(frozen=True, slots=True)
class Fault:
    """A call that raises once, from a stage of a round on.

    Attributes:
        stage: "compute", "poll", "ahead" or "turn".
        owner: path from the linker to the call's object; "torch" for torch.
        call: its name.
    """

    stage: str
    owner: str
    call: str


FAULTS = [
    Fault("compute", "_numbers", "read"),
    Fault("compute", "", "_after_forward"),
    Fault("compute", "side._worker", "start_stores"),
    Fault("poll", "side._worker", "finished"),
    Fault("turn", "side", "lookup"),
    Fault("turn", "_numbers", "read"),
    Fault("turn", "", "_after_forward"),
    Fault("turn", "side._worker", "start_loads"),
    Fault("turn", "side._worker", "wait_for_layer"),
    Fault("turn", "side._worker", "take_bad_blocks"),
    Fault("turn", "side._worker", "report"),
]
LEADS = [Fault("ahead", "side.requests.waiting", call) for call in ("look_up", "go_on", "is_new")]
"""On the rank that decides."""
CASES = [(0, fault) for fault in LEADS]
CASES += [(rank, fault) for fault in FAULTS for rank in range(RANKS)]


class InjectedError(Exception):
    """Nobody expects it."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank saw of a round.

    Attributes:
        loaded: tokens that were loaded.
        served: whether SGLang serves the request.
        right: whether the loaded bytes are those that were computed.
        free: slots of the pool that are free at the end, when SGLang evicts all it can.
        raised: whether the fault happened.
    """

    loaded: int
    served: bool
    right: bool
    free: int
    raised: bool


class Process:
    """One rank and the rounds that it plays."""

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
            "ssd_timeout_seconds": PATIENCE_SECONDS,
            "always_load": True,
        }
        group = distributed.group.WORLD
        self._linked = LinkedRank(folder, ranks_of(group), group, settings)
        self._number = rank
        self._rounds = 0
        self._raised = False

    def play(self, fault: Fault | None) -> Round:
        """Compute a prompt, forget it, look ahead at it beside an unknown one, run both."""
        self._rounds += 1
        self._raised = False
        linked, number = self._linked, 1000 * self._rounds
        tokens = list(range(number, number + 3 * PAGE))
        others = [each + 500 for each in tokens]
        self._arm(fault, "compute")
        wanted = linked.compute(tokens, seed=number + self._number)
        self._arm(fault, "poll")
        linked.settle()
        linked.forget()
        requests = [
            linked.request(f"b {number}", [*others, 1]),
            linked.request(f"a {number}", [*tokens, 1]),
        ]
        self._arm(fault, "ahead")
        linked.look_ahead(requests)
        self._arm(fault, "turn")
        linked.run(requests[0])
        loaded, served, found = linked.run(requests[1])
        right = same(found, [each[:loaded] for each in wanted])
        self._recover()
        free = linked.slots.available_size()
        return Round(loaded, served, right, free, self._raised)

    def _recover(self) -> None:
        """Step until the cache has recovered; it stores nothing before."""
        cache, busy = self._linked.rank.side._cache, True
        while busy:
            self._linked.tree.check_hicache_events()
            message = torch.tensor(int(cache is not None and cache.busy))
            distributed.all_reduce(message, distributed.ReduceOp.MAX)
            busy = bool(message)

    def _arm(self, fault: Fault | None, stage: str) -> None:
        if fault is None or fault.stage != stage or self._raised:
            return
        owner: Any = torch if fault.owner == "torch" else self._linked.linker
        for name in filter(None, fault.owner.split(".")) if owner is not torch else ():
            owner = getattr(owner, name)
        inner: Callable[..., Any] = getattr(owner, fault.call)

        def fail(*_: object, **__: object) -> None:
            setattr(owner, fault.call, inner)
            self._raised = True
            raise InjectedError(fault)

        setattr(owner, fault.call, fail)


def serve(rank: int, folder: Path, pipe: Connection) -> None:
    """Play the rounds that come by `pipe`: a `Fault` or None each, answered by a `Round`."""
    process = Process(rank, folder)
    while True:
        pipe.send(process.play(pipe.recv()))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    made = Pairs(tmp_path_factory.mktemp("pairs"), serve)
    yield made
    made.forget()


@pytest.fixture
def pair(pairs: Pairs, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pairs.pair(request.session) as made:
        yield made


def name_of(case: tuple[int, Fault]) -> str:
    rank, fault = case
    return f"{fault.stage}, {fault.owner}.{fault.call} on rank {rank}"


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_sglangs_ranks_stay_in_step_when_a_call_fails_on_one(
    pair: Pair, case: tuple[int, Fault]
) -> None:
    rank, fault = case
    rounds = pair.play({rank: fault})
    assert rounds[rank].raised, "the fault did not happen"
    assert len({(each.loaded, each.served, each.free) for each in rounds}) == 1
    assert all(each.right for each in rounds if each.served)
    free = rounds[0].free
    assert pair.play({}) == [Round(3 * PAGE, True, True, free, False)] * RANKS
