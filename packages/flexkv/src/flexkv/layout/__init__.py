# SPDX-License-Identifier: Apache-2.0
"""The places of an engine's pages, and the format of the FlexKV blocks made of them.

Everything is derived from addresses, shapes and strides of the engine's tensors, never from the
name of an attention backend or the engine's version.
"""

from __future__ import annotations

from flexkv.layout.block_format import (
    SLOT_ALIGNMENT,
    USUAL_BLOCK,
    BlockFormat,
    Sharding,
    block_identity,
    choose_engine_blocks,
    fingerprint,
    join_stages,
)
from flexkv.layout.kv_layout import KVLayout, PlacedPlane, share_of
from flexkv.layout.planes import Plane, TensorView

__all__ = [
    "SLOT_ALIGNMENT",
    "USUAL_BLOCK",
    "BlockFormat",
    "KVLayout",
    "PlacedPlane",
    "Plane",
    "Sharding",
    "TensorView",
    "block_identity",
    "choose_engine_blocks",
    "fingerprint",
    "join_stages",
    "share_of",
]
