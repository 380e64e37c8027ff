# SPDX-License-Identifier: Apache-2.0
"""One decision for all ranks. SGLang runs a scheduler beside each rank; the first one decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from flexkv.engine.boundary import ErrorBoundary


class Ranks(Protocol):
    """The ranks that hold the shards of one KV cache, as one of them sees them.

    Attributes:
        rank: number of this rank, from 0.
        count: the number of ranks.
    """

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...

    def agree(self, numbers: Sequence[int], count: int) -> list[int]:
        """Rank 0's numbers, on all ranks. Waits until all ranks have called.

        All ranks make these calls in the same order.

        Args:
            numbers: 64-bit integers; ignored on all ranks but 0.
            count: length of rank 0's `numbers`, the same on all ranks.
        """
        ...

    def all(self, holds: bool) -> bool:
        """Whether `holds` is true on all ranks. Waits until all ranks have called."""
        ...


class Exchanges:
    """The exchanges of a rank, each of which it reaches whatever fails before.

    A rank that left one out would make the others wait, or read its next message in place of this
    one. What a rank contributes is therefore made within the exchange, and an error becomes a
    value.

    Args:
        ranks: of the engine; borrowed.
        boundary: where errors end.
    """

    def __init__(self, ranks: Ranks, boundary: ErrorBoundary) -> None:
        self.ranks = ranks
        self._boundary = boundary

    def decide(
        self, place: str, consequence: str, make: Callable[[], Sequence[int]], count: int
    ) -> list[int]:
        """What rank 0 decides, on all ranks; zeros after an error.

        Args:
            place: see `ErrorBoundary.guard`.
            consequence: likewise.
            make: returns `count` 64-bit integers; called on rank 0 only.
            count: the same on all ranks.
        """
        numbers: Sequence[int] = [0] * count
        if self.ranks.rank == 0:
            with self._boundary.guard(place, consequence):
                made = make()
                if len(made) != count:
                    raise ValueError(f"{len(made)} numbers for the other ranks, not {count}")
                numbers = made
        return self.ranks.agree(numbers, count)

    def all(self, place: str, consequence: str, holds: Callable[[], bool]) -> bool:
        """Whether `holds` returns true on all ranks. An error counts as false.

        Args:
            place: see `ErrorBoundary.guard`.
            consequence: likewise.
            holds: called on this rank.
        """
        held = False
        with self._boundary.guard(place, consequence):
            held = holds()
        return self.ranks.all(held)


class OneRank:
    """An engine of one rank."""

    rank = 0
    count = 1

    def agree(self, numbers: Sequence[int], count: int) -> list[int]:
        return list(numbers)

    def all(self, holds: bool) -> bool:
        return holds


class CpuGroup:
    """The ranks of a group of SGLang's whose messages are CPU tensors.

    Args:
        group: a `torch.distributed` group; borrowed.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._first = torch.distributed.get_global_rank(group, 0)
        self.rank: int = torch.distributed.get_rank(group)
        self.count: int = torch.distributed.get_world_size(group)

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


def ranks_of(group: Any | None) -> Ranks:
    """The ranks of a `torch.distributed` group; one rank if there is no group."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if group is None or not distributed or torch.distributed.get_world_size(group) == 1:
        return OneRank()
    return CpuGroup(group)
