# SPDX-License-Identifier: Apache-2.0
"""FlexKV's view of vLLM's own prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class Pool:
    """An `EnginePool` over vLLM's block pool, which it borrows."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks

    def has(self, block_hash: Any, group: int) -> bool:
        """See `EnginePool.has`."""
        return self._blocks.get_cached_block(block_hash, [group]) is not None

    def forget(self, engine_blocks: set[int]) -> None:
        """See `EnginePool.forget`."""
        self._blocks.evict_blocks(engine_blocks)
