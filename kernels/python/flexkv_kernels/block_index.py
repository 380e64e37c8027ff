# SPDX-License-Identifier: Apache-2.0
"""The native indexes of tiers: `block_index.pyi` describes them."""

from __future__ import annotations

from flexkv.index.block_index import BlockState
from flexkv_kernels._library import LIBRARY

NativeBlockIndex = LIBRARY.brief.fkv_block_index_type(tuple(BlockState))
pack_keys = LIBRARY.brief.fkv_packed_keys_type()
NativeKeySet = LIBRARY.brief.fkv_key_set_type()
NativeIndexReader = LIBRARY.brief.fkv_index_reader_type()
NativeSlotIndex = LIBRARY.brief.fkv_slot_index_type()
index_bytes = LIBRARY.brief.fkv_block_index_bytes
key_set_bytes = LIBRARY.brief.fkv_key_set_bytes
