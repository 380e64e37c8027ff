# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang_world import Rank, hashes_of

from flexkv_sglang import copies
from packages.tier_blocks import assert_no_slot_is_lost, writing_blocks


def broken(*_: object) -> Any:
    raise RuntimeError("broken by the test")


def test_a_store_whose_slots_are_unknown_is_cancelled(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks were found otherwise, and nobody had copied them."""
    rank = make_rank()
    cache: Any = rank.side._cache
    keys, none = rank.side.keys_of(hashes_of("a", 3)), rank.side.keys_of([])
    with monkeypatch.context() as patch:
        patch.setattr(copies, "_slots_of", broken)
        with pytest.raises(RuntimeError, match="broken by the test"):
            copies.reserve(cache, none, keys, [0, 1, 2])
    assert cache.transfers_under_way == 0
    assert writing_blocks(cache._index) == {}
    assert_no_slot_is_lost(cache._index)
