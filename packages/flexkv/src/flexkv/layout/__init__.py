# SPDX-License-Identifier: Apache-2.0
"""Where an engine keeps the pages of its KV cache, and what a FlexKV block of them looks like.

Everything is derived from addresses, shapes and strides of the engine's tensors; neither the
name of an attention backend nor a version of the engine says anything here.
"""

from __future__ import annotations

from flexkv.layout.block_format import (
    SLOT_ALIGNMENT,
    BlockFormat,
    Sharding,
    choose_engine_blocks,
    fingerprint,
    join_stages,
)
from flexkv.layout.kv_layout import KVLayout, PlacedPlane
from flexkv.layout.planes import Plane, TensorView
from flexkv.layout.share import share_of

__all__ = [
    "SLOT_ALIGNMENT",
    "BlockFormat",
    "KVLayout",
    "PlacedPlane",
    "Plane",
    "Sharding",
    "TensorView",
    "choose_engine_blocks",
    "fingerprint",
    "join_stages",
    "share_of",
]
