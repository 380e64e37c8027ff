# SPDX-License-Identifier: Apache-2.0
"""Host pools of HiCache's shapes over real tensors, for where SGLang is not installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 2, 8, 4, 12
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class MhaPool:
    """K and V of `PAGES` pages in one of the layouts."""

    def __init__(self, layout: str, pages: int = PAGES, page_size: int = PAGE) -> None:
        tokens = pages * page_size
        shape = {
            "layer_first": (2, LAYERS, tokens, HEADS, DIM),
            "page_first": (2, tokens, LAYERS, HEADS, DIM),
            "page_first_direct": (2, pages, LAYERS, page_size, HEADS, DIM),
            "page_head": (2, pages, HEADS, page_size, LAYERS, DIM),
        }[layout]
        self.layout = layout
        self.page_size = page_size
        self.dtype = torch.float16
        self.layer_num, self.head_num, self.head_dim = LAYERS, HEADS, DIM
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        row = HEADS * DIM * self.dtype.itemsize
        v = self.kv_buffer[0].nbytes
        pointers = []
        for token in indices[:: self.page_size].tolist():
            if self.layout == "layer_first":
                layer = self.kv_buffer[0, 0].nbytes
                starts = [token * row + number * layer for number in range(LAYERS)]
            else:
                starts = [token * LAYERS * row]
            base = self.kv_buffer.data_ptr()
            pointers += [base + start + part for start in starts for part in (0, v)]
        pieces = LAYERS if self.layout == "layer_first" else 1
        size = row * self.page_size * LAYERS // pieces
        return pointers, [size] * len(pointers)

    def page(self, number: int) -> torch.Tensor:
        """K and V of a page."""
        begin, end = number * self.page_size, (number + 1) * self.page_size
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, begin:end]
        if self.layout == "page_first":
            return self.kv_buffer[:, begin:end]
        return self.kv_buffer[:, number]


class MlaPool:
    """Latent KV of `PAGES` pages, one piece a page."""

    layout = "page_first"
    dtype = torch.bfloat16
    kv_lora_rank, qk_rope_head_dim = 24, 8
    page_size, layer_num = PAGE, LAYERS

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros((PAGES * PAGE, LAYERS, 1, 32), dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        row = self.kv_buffer[0].nbytes
        first = indices[::PAGE].tolist()
        return [self.kv_buffer.data_ptr() + token * row for token in first], [PAGE * row] * len(
            first
        )

    def page(self, number: int) -> torch.Tensor:
        return self.kv_buffer[number * PAGE : (number + 1) * PAGE]


MAKERS: dict[str, Callable[[], MhaPool | MlaPool]] = {
    **{layout: lambda layout=layout: MhaPool(layout) for layout in LAYOUTS},
    "mla": MlaPool,
}


def fill(pool: MhaPool | MlaPool, seed: int = 0) -> None:
    """Other numbers everywhere."""
    generator = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))


def tokens_of(*pages: int, page_size: int = PAGE) -> torch.Tensor:
    """Indices of all tokens of pages."""
    ranges = (range(page * page_size, (page + 1) * page_size) for page in pages)
    return torch.tensor(list(itertools.chain(*ranges)), dtype=torch.int64)
