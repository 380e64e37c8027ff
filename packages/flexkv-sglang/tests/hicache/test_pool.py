# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hicache.fake_pools import LAYOUTS, MAKERS, MhaPool, fill, tokens_of

from flexkv.types.errors import LayoutError
from flexkv.types.mover import Direction
from flexkv_sglang.hicache.pool import PagePool


@pytest.mark.parametrize("kind", MAKERS)
def test_a_page_comes_back_to_another_place(kind: str) -> None:
    source, target = MAKERS[kind](), MAKERS[kind]()
    fill(source)
    pages = PagePool("kv", source)
    assert pages.page_bytes == source.page(0).nbytes
    memory = bytearray(pages.slot_bytes)
    block = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for here, there in ((1, 5), (11, 0)):
        pages.copy(Direction.STORE, pages.first_tokens(tokens_of(here), 1), [block])
        first = pages.first_tokens(tokens_of(there, 7), 2)
        PagePool("kv", target).copy(Direction.LOAD, first, [block, block])
        assert all(torch.equal(target.page(each), source.page(here)) for each in (there, 7))
    assert target.page(4).count_nonzero() == 0


def test_a_block_is_a_whole_number_of_4_kib() -> None:
    pool = PagePool("kv", MhaPool("page_first"))
    assert pool.slot_bytes == 4096
    assert pool.page_bytes < 4096


def test_layouts_are_told_apart() -> None:
    traits = {tuple(PagePool("kv", MhaPool(layout)).traits) for layout in LAYOUTS}
    assert len(traits) == len(LAYOUTS)


@pytest.mark.parametrize("change", ["dtype", "page_size", "head_num", "start_layer"])
def test_geometries_are_told_apart(change: str) -> None:
    plain, other = MhaPool("page_head"), MhaPool("page_head")
    values: dict[str, Any] = {"dtype": torch.bfloat16, "page_size": 2}
    setattr(other, change, values.get(change, 5))
    assert PagePool("kv", plain).traits != PagePool("kv", other).traits


@pytest.mark.parametrize("indices", [tokens_of(1), tokens_of(1, 2, 3), tokens_of(1, 2)[:-1]])
def test_other_indices_than_those_of_the_pages_are_refused(indices: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="for 2 pages"):
        PagePool("kv", MhaPool("page_first")).first_tokens(indices, 2)


def test_a_pool_that_changes_is_refused() -> None:
    pool = MhaPool("page_first")
    pages = PagePool("kv", pool)
    pool.layout = "layer_first"
    with pytest.raises(ValueError, match="other sizes"):
        pages.copy(Direction.STORE, [0], [0])


class Refusing(MhaPool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        raise ValueError("Unsupported layout: layer_first")


class Bare(MhaPool):
    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        return None


@pytest.mark.parametrize(("kind", "reason"), [(Refusing, "Unsupported"), (Bare, "no pages")])
def test_a_pool_that_does_not_find_its_pages_is_refused(kind: type[MhaPool], reason: str) -> None:
    with pytest.raises(LayoutError, match=f"indexer.*{kind.__name__}.*{reason}.*allowed"):
        PagePool("indexer", kind("page_first"))
