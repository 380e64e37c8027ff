# SPDX-License-Identifier: Apache-2.0
"""The blocks of an index, for tests."""

from __future__ import annotations

from flexkv.index.block_index import Block, BlockIndex, BlockState


def ready_blocks(index: BlockIndex) -> dict[bytes, Block]:
    """Those that lookups find, by key."""
    return {block.key: block for block in index.blocks if block.state is BlockState.READY}


def writing_blocks(index: BlockIndex) -> dict[bytes, Block]:
    """Those that are being written, by key."""
    return {block.key: block for block in index.blocks if block.state is BlockState.WRITING}


def assert_no_slot_is_lost(index: BlockIndex) -> None:
    """Each slot is free, or has one block that is ready."""
    index.sweep(index.num_slots)
    slots = {block.slot for block in ready_blocks(index).values()}
    assert len(slots) == len(index) == index.num_slots - index.free_slots
    assert slots <= set(range(index.num_slots))
