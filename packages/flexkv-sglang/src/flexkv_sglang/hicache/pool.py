# SPDX-License-Identifier: Apache-2.0
"""Finds the bytes of pages in HiCache's host pools, and copies them to and from blocks."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from flexkv.layout.block_format import SLOT_ALIGNMENT
from flexkv.types.errors import LayoutError
from flexkv.types.mover import Direction

_GEOMETRY = """
    layout dtype page_size layer_num start_layer end_layer head_num head_dim v_head_dim
    kv_lora_rank qk_rope_head_dim storage_format_tag
"""
"""Attributes of SGLang's pools that decide the bytes of a page. Not every pool has all of them."""


class PagePool:
    """The pages of one host pool. Raises LayoutError if the pool does not report where its pages
    are, or has none.

    Args:
        name: SGLang's name of the pool.
        pool: SGLang's `HostKVCache`; borrowed. SGLang keeps its memory at one address while it
            serves. Its `get_page_buffer_meta` finds the pieces of pages, of which every page has as
            many.

    Attributes:
        page_bytes: bytes of a page, the sum of its pieces.
        slot_bytes: bytes of a block that holds a page, a multiple of 4 KiB.
        traits: what the bytes of a page depend on, apart from model and rank.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self._pool = pool
        self.page_tokens = int(pool.page_size)
        self._pieces = self._describe()
        self.page_bytes = sum(self._pieces)
        self.slot_bytes = -(-self.page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.traits = [
            name,
            type(pool).__name__,
            *(f"{trait} {getattr(pool, trait, None)}" for trait in _GEOMETRY.split()),
            f"pieces {self._pieces}",
        ]

    def first_tokens(self, indices: torch.Tensor, pages: int) -> Sequence[int]:
        """The indices of the first tokens of pages. `indices` are those of all their tokens, int64,
        page after page; as many as `pages` have, else this raises ValueError."""
        if indices.numel() != pages * self.page_tokens:
            raise ValueError(
                f"{indices.numel()} indices for {pages} pages of {self.page_tokens} tokens"
            )
        return array("Q", indices[:: self.page_tokens].tolist())

    def copy(
        self, direction: Direction, first_tokens: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Copy pages from the blocks at these addresses (`LOAD`) or to them. The bytes of a block
        behind its page stay as they are. SGLang must keep the pages allocated. Raises ValueError if
        the pieces of the pages have other sizes than at the start."""
        first = torch.tensor(list(first_tokens), dtype=torch.int64)
        indices = first[:, None] + torch.arange(self.page_tokens, dtype=torch.int64)
        addresses, sizes = self._pool.get_page_buffer_meta(indices.flatten())
        if tuple(sizes) != self._pieces * len(blocks):
            raise ValueError(f"pages of {self.name} have pieces of other sizes than at the start")
        offsets = [*accumulate(self._pieces[:-1], initial=0)]
        places = [block + offset for block in blocks for offset in offsets]
        for address, place, size in zip(addresses, places, sizes, strict=True):
            to, source = (address, place) if direction is Direction.LOAD else (place, address)
            ctypes.memmove(to, source, size)

    def _describe(self) -> tuple[int, ...]:
        """Sizes of the pieces of a page, in bytes."""
        first = torch.arange(self.page_tokens, dtype=torch.int64)
        allowed = "allowed: a layout by which HiCache finds pages, such as page_first"
        where = f"HiCache's pool {self.name!r} ({type(self._pool).__name__}, {self._pool.layout})"
        try:
            found: Any = self._pool.get_page_buffer_meta(first)
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise LayoutError(f"{where} cannot be stored: {error}; {allowed}") from None
        if not found or not found[0] or sum(found[1]) == 0:
            raise LayoutError(f"{where} has no pages of its own; {allowed}")
        return tuple(map(int, found[1]))
