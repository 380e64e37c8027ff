# SPDX-License-Identifier: Apache-2.0
"""FlexKV's view of vLLM's own prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class Pool:
    """An `EnginePool` over vLLM's block pool, which it borrows."""

    __slots__ = ("_blocks", "_old_blocks")

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self._old_blocks: object = None

    @property
    def blocks_by_hash(self) -> object:
        """vLLM's map of its blocks. It makes a new one when it resets its prefix cache."""
        return self._blocks.cached_block_hash_to_block

    def has(self, block_hash: Any, group: int) -> bool:
        """See `EnginePool.has`."""
        return self._blocks.get_cached_block(block_hash, [group]) is not None

    def forget(self, engine_blocks: set[int]) -> None:
        """See `EnginePool.forget`."""
        self._blocks.evict_blocks(engine_blocks)

    def weights_changed(self, in_use: bool) -> None:
        """See `EnginePool.weights_changed`."""
        found_by: Any = self.blocks_by_hash
        self._old_blocks = found_by if in_use or len(found_by) else None

    @property
    def may_find_old_blocks(self) -> bool:
        """See `EnginePool.may_find_old_blocks`."""
        return self._old_blocks is self.blocks_by_hash
