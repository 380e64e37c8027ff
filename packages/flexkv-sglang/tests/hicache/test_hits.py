# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv_sglang.hicache.hits import Hit, PoolPages, find_hit, leading

Y, N = True, False
bits = st.lists(st.booleans(), min_size=6, max_size=6)


@pytest.mark.parametrize(
    ("present", "pages"), [([], 0), ([N, Y], 0), ([Y, Y, N, Y], 2), ([Y, Y], 2)]
)
def test_a_hit_ends_at_the_first_page_that_is_missing(present: list[bool], pages: int) -> None:
    assert leading(present) == pages
    assert find_hit("kv", present, {}).pages == pages


def test_an_index_has_to_be_there_for_every_page() -> None:
    index = PoolPages([Y, Y, N, Y])
    assert find_hit("kv", [Y] * 4, {"indexer": index}) == Hit(2, {"kv": 4, "indexer": 2}, [1, 2])


def test_a_state_has_to_be_there_at_the_end_only() -> None:
    state = PoolPages([N, Y, N, N, Y], 1)
    assert find_hit("kv", [Y] * 4, {"mamba": state}) == Hit(2, {"kv": 4, "mamba": 2}, [2])


def test_a_window_has_to_be_whole() -> None:
    window = PoolPages([Y, N, Y, Y, N], 2)
    assert find_hit("kv", [Y] * 5, {"swa": window}) == Hit(4, {"kv": 5, "swa": 4}, [1, 4])


def test_a_pool_without_any_page_is_not_named() -> None:
    state = PoolPages([N] * 3, 1)
    assert find_hit("kv", [Y] * 3, {"mamba": state}) == Hit(0, {"kv": 3}, [])


@given(bits, bits, bits, st.integers(1, 4))
def test_a_restorable_prefix_has_all_it_needs(
    kv: list[bool], index: list[bool], state: list[bool], trailing: int
) -> None:
    others = {
        "indexer": PoolPages(index),
        "mamba": PoolPages(state, trailing),
    }
    expected = [
        length
        for length in range(1, 7)
        if all(kv[:length])
        and all(index[:length])
        and all(state[max(0, length - trailing) : length])
    ]
    hit = find_hit("kv", kv, others)
    assert hit.restorable == expected
    assert hit.pages == max(expected, default=0)
