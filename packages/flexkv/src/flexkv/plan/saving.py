# SPDX-License-Identifier: Apache-2.0
"""The time that hits save: computing a prompt, less loading its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The time that an engine takes to compute prompts."""

    per_token: float
    """Seconds per token, wherever it is in the prompt."""
    per_pair: float
    """Further seconds for each earlier token that attention reads; 0 if unknown."""
    source: str
    """The source of these figures, as text for the user."""

    def of_range(self, start: int, stop: int) -> float:
        """Seconds to compute the tokens at positions `start` to `stop - 1` of a prompt."""
        return (stop - start) * (self.per_token + self.per_pair * (start + stop) / 2)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The seconds that loading a block takes: from host memory to the engine, and from disk to host
    memory."""

    memory_seconds: float
    disk_seconds: float


class Savings:
    """The seconds that a hit of each block saves, by the position of the block in its prompt; those
    of a block from host memory are `of_memory`, float64 (most_blocks,). A block of which loading
    takes longer than computing saves nothing, because FlexKV computes it."""

    def __init__(
        self, cost: PrefillCost, load: LoadCost, block_tokens: int, most_blocks: int
    ) -> None:
        middle = (np.arange(most_blocks) + 0.5) * block_tokens
        computing = block_tokens * (cost.per_token + cost.per_pair * middle)
        self.of_memory: npt.NDArray[np.float64] = np.maximum(0.0, computing - load.memory_seconds)
        of_disk = np.maximum(0.0, computing - load.memory_seconds - load.disk_seconds)
        self._memory_sums = np.concatenate(([0.0], np.cumsum(self.of_memory)))
        self._disk_sums = np.concatenate(([0.0], np.cumsum(of_disk)))

    def of_hit(self, start: int, stop: int, from_disk: int) -> float:
        """Seconds that loading the blocks `start` to `stop - 1` of a prompt saves, of which the
        last `from_disk` come from disk."""
        disk = stop - from_disk
        memory = self._memory_sums[disk] - self._memory_sums[start]
        return float(memory + self._disk_sums[stop] - self._disk_sums[disk])
