# SPDX-License-Identifier: Apache-2.0
"""The native index of a tier, as `flexkv.index` describes it; `kernels/src/index` has the code."""

from __future__ import annotations

from typing import Protocol

from flexkv.eviction import EvictionPolicy
from flexkv.index import BlockIndex, BlockState
from flexkv_kernels._library import LIBRARY


class _MakeBlockIndex(Protocol):
    def __call__(self, num_slots: int, policy: EvictionPolicy | None, /) -> BlockIndex:
        """An index of so many slots; without a policy the block used longest ago leaves first.

        Raises:
            ValueError: the number is not allowed.
        """
        ...


NativeBlockIndex: _MakeBlockIndex = LIBRARY.brief.fkv_block_index_type(tuple(BlockState))
