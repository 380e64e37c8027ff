# SPDX-License-Identifier: Apache-2.0
"""Pages of numpy for a cache of the library, and keys of their blocks."""

from __future__ import annotations

import numpy as np

from flexkv import KVLayout, TensorView

PAGES = 32
PAGE_SHAPE = (16, 64)
SLOT_GB = 4096 / (1 << 30)
"""A block of the pages below: two tensors of 16 x 64 bytes, in slots of 4 KiB."""

KEYS = [b"block %d" % i for i in range(PAGES)]


class Pages:
    """Two tensors whose pages hold what a number says, or zeros."""

    def __init__(self) -> None:
        self.tensors = [np.zeros((PAGES, *PAGE_SHAPE), np.uint8) for _ in range(2)]
        views = [TensorView.of(f"layer {i}", each) for i, each in enumerate(self.tensors)]
        self.layout = KVLayout.from_tensors(views, PAGES)

    def write(self, page: int, number: int) -> None:
        for layer, tensor in enumerate(self.tensors):
            tensor[page] = number * 2 + layer

    def read(self, page: int) -> int | None:
        """The number that a page holds; None if it holds anything else."""
        number = int(self.tensors[0][page, 0, 0]) // 2
        whole = all((t[page] == number * 2 + i).all() for i, t in enumerate(self.tensors))
        return number if whole else None

    def held(self) -> dict[int, int | None]:
        """What each page holds that was written to."""
        return {page: self.read(page) for page in range(PAGES) if self.tensors[1][page].any()}
