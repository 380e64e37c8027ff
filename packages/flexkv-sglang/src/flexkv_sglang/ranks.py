# SPDX-License-Identifier: Apache-2.0
"""One decision for all ranks. SGLang runs a scheduler beside each rank; the first one decides."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from flexkv.engine.boundary import ErrorBoundary
from flexkv.types.errors import RankError
from flexkv_sglang.stages import DECISIONS, StagedLoads, StageLinks

logger = logging.getLogger("flexkv.sglang")

_TEXT_BYTES = 2048
"""Bytes of an error's text that other ranks get. Longer texts are cut off."""


class Ranks:
    """The ranks that hold the shards of one KV cache, as one of them sees them. This class has one
    rank, which agrees with itself.

    Numbers of ranks, and of stages of a pipeline, begin with 0; later stages have later ranks.
    `loads` are those of a pipeline; None with one stage.
    """

    rank: int = 0
    count: int = 1
    stage: int = 0
    stages: int = 1
    loads: StagedLoads | None = None

    def agree(self, numbers: Sequence[int], count: int) -> list[int]:
        """Rank 0's numbers, 64-bit integers, on all ranks; those of others are ignored. `count` is
        their number, the same on all ranks. Waits until all ranks have called.

        All ranks make these calls in the same order.
        """
        return list(numbers)

    def all(self, holds: bool) -> bool:
        """Whether `holds` is true on all ranks. Waits until all ranks have called."""
        return holds

    def first_error(self, text: str | None) -> tuple[int, str] | None:
        """The lowest rank that has an error, and the error's text; None if no rank has one. The
        same on all ranks. Waits until all ranks have called."""
        return None if text is None else (0, text)


@contextlib.contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """All ranks leave the block in the same way: if it raises on one, it raises on all. Otherwise
    the others would wait for that rank in their next exchange. The block makes none itself. Raises
    RankError if the block raised on another rank only. On the rank itself, its own error goes
    on."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
        if ranks.count > 1:
            # Another rank may raise first, and SGLang then kills this one.
            logger.error(
                "FlexKV cannot start on rank %d; no rank starts", ranks.rank, exc_info=error
            )
    first = ranks.first_error(None if failed is None else str(failed) or type(failed).__name__)
    if failed is not None:
        raise failed
    if first is not None:
        rank, text = first
        raise RankError(f"rank {rank} of the engine cannot start: {text}")


class Exchanges:
    """The exchanges of a rank, each of which it reaches whatever fails before.

    A rank that left one out would make the others wait, or read its next message in place of this
    one. What a rank contributes is therefore made within the exchange, and an error becomes a
    value."""

    def __init__(self, ranks: Ranks, boundary: ErrorBoundary) -> None:
        self.ranks = ranks
        self._boundary = boundary

    def decide(
        self, place: str, consequence: str, make: Callable[[], Sequence[int]], count: int
    ) -> list[int]:
        """What rank 0 decides, on all ranks: the `count` 64-bit integers that `make` returns there;
        zeros after an error. `place`, `consequence`: see `ErrorBoundary.guard`."""
        numbers: Sequence[int] = [0] * count
        if self.ranks.rank == 0:
            with self._boundary.guard(place, consequence):
                made = make()
                if len(made) != count:
                    raise ValueError(f"{len(made)} numbers for the other ranks, not {count}")
                numbers = made
        return self.ranks.agree(numbers, count)

    def all(self, place: str, consequence: str, holds: Callable[[], bool]) -> bool:
        """Whether `holds` returns true on all ranks. An error counts as false."""
        held = False
        with self._boundary.guard(place, consequence):
            held = holds()
        return self.ranks.all(held)


class CpuGroup(Ranks):
    """The ranks of a `torch.distributed` group of SGLang's, borrowed, whose messages are CPU
    tensors."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._first = torch.distributed.get_global_rank(group, 0)
        self.rank = torch.distributed.get_rank(group)
        self.count = torch.distributed.get_world_size(group)

    def agree(self, numbers: Sequence[int], count: int) -> list[int]:
        made = list(numbers) if self.rank == 0 else [0] * count
        message = torch.tensor(made, dtype=torch.int64)
        torch.distributed.broadcast(message, src=self._first, group=self._group)
        given: list[int] = message.tolist()
        return given

    def all(self, holds: bool) -> bool:
        message = torch.tensor(int(holds))
        least = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(message, least, group=self._group)
        return bool(message)

    def first_error(self, text: str | None) -> tuple[int, str] | None:
        message = torch.tensor(self.count if text is None else self.rank)
        least = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(message, least, group=self._group)
        failed = int(message)
        if failed == self.count:
            return None
        own = (text or "").encode()[:_TEXT_BYTES] if failed == self.rank else b""
        said = torch.tensor(list(own.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
        source = torch.distributed.get_global_rank(self._group, failed)
        torch.distributed.broadcast(said, src=source, group=self._group)
        return failed, bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")


class StagedRanks(Ranks):
    """The ranks of all stages; see `Ranks`. The first stage decides. Calls wait for earlier stages
    only, but for `first_error`, which all ranks call at the start.

    Args:
        own: the ranks of this stage.
        across: the ranks of all stages that have the same number in theirs; `links` are between
            them.
    """

    def __init__(self, own: Ranks, across: Ranks, links: StageLinks) -> None:
        self.loads = StagedLoads(links)
        self.stage, self.stages = links.stage, links.stages
        self.rank = links.stage * own.count + own.rank
        self.count = links.stages * own.count
        self._own = own
        self._across = across
        self._links = links

    def agree(self, numbers: Sequence[int], count: int) -> list[int]:
        return self._passed_on(self._own.agree(numbers, count) if self.stage == 0 else None, count)

    def all(self, holds: bool) -> bool:
        """Whether `holds` is true on all ranks of the first stage."""
        made = [int(self._own.all(holds))] if self.stage == 0 else None
        return bool(self._passed_on(made, 1)[0])

    def first_error(self, text: str | None) -> tuple[int, str] | None:
        own = self._own.first_error(text)
        base = self.stage * self._own.count
        named = None if own is None else f"{base + own[0]} {own[1]}"
        first = self._across.first_error(named)
        if first is None:
            return None
        rank, _, said = first[1].partition(" ")
        return int(rank), said

    def _passed_on(self, made: list[int] | None, count: int) -> list[int]:
        """`made`: on the first stage; the others receive it."""
        links = self._links
        if made is None:
            made = links.receive(count, links.stage - 1, DECISIONS)
        if links.stage < links.last:
            links.send(made, links.stage + 1, DECISIONS)
        return made


def ranks_of(group: Any | None, stages: Any | None = None) -> Ranks:
    """The ranks of an engine; one rank if there are no others. `group` has the ranks of a stage,
    `stages` those that have the same number in their stages, None without a pipeline."""
    own: Ranks = CpuGroup(group) if _has_others(group) else Ranks()
    return StagedRanks(own, CpuGroup(stages), StageLinks(stages)) if _has_others(stages) else own


def _has_others(group: Any | None) -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return group is not None and distributed and torch.distributed.get_world_size(group) > 1
