# SPDX-License-Identifier: Apache-2.0
"""Where engine blocks lie in the arena: computed before a forward, for all slots at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from flexkv.host.arena import Arena


class SlotOffsets:
    """The offsets of one rank's engine blocks in the slots of an arena.

    Args:
        arena: attached.
        rank: this rank.
        block_step: bytes from one engine block to the next in a slot.
    """

    def __init__(self, arena: Arena, rank: int, block_step: int) -> None:
        self._slot_bytes = arena.spec.format.slot_bytes
        steps = np.arange(arena.spec.format.engine_blocks, dtype=np.uint64)
        self._blocks = steps * np.uint64(block_step) + np.uint64(arena.shard_offset(0, rank))

    def of(self, slots: Sequence[int], skip: int = 0, count: int | None = None) -> array[int]:
        """Bytes from the arena's address to each engine block of `slots`, in order: `count` blocks,
        or all, from the one of number `skip` on."""
        # By an array: NumPy takes ten times as long for a list of Python's integers.
        starts = np.frombuffer(array("Q", slots), dtype=np.uint64) * np.uint64(self._slot_bytes)
        places = (starts[:, None] + self._blocks).reshape(-1)[skip:]
        return array("Q", places[:count].tobytes())
