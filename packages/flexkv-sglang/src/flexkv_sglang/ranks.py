# SPDX-License-Identifier: Apache-2.0
"""One decision for all ranks. SGLang runs a scheduler beside each rank; the first one decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """The ranks that hold the shards of one KV cache, as one of them sees them.

    Attributes:
        rank: this one.
        count: of all.
    """

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...

    def agree(self, numbers: Sequence[int], count: int) -> list[int]:
        """The numbers that rank 0 gives. All ranks call it in the same order.

        Args:
            numbers: of rank 0; what others give is ignored.
            count: how many there are, the same for all ranks.
        """
        ...


class OneRank:
    """An engine of one rank."""

    rank = 0
    count = 1

    def agree(self, numbers: Sequence[int], count: int) -> list[int]:
        return list(numbers)


class CpuGroup:
    """Ranks that SGLang joined in a group whose messages go by CPU.

    Args:
        group: SGLang's.
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


def ranks_of(group: Any | None) -> Ranks:
    """The ranks of a group of SGLang's; one if there is no group."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if group is None or not distributed or torch.distributed.get_world_size(group) == 1:
        return OneRank()
    return CpuGroup(group)
