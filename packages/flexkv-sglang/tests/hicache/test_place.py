# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.types.errors import ConfigError
from flexkv_sglang.hicache.place import Place


def place(mla: bool = False, copies: int = 1, **changes: Any) -> Place:
    base = {"tp_rank": 0, "tp_size": 4, "pp_rank": 0, "pp_size": 2}
    base |= {"attn_cp_rank": 0, "attn_cp_size": 1}
    return Place.of(SimpleNamespace(**(base | changes), is_mla_model=mla), copies)


@pytest.mark.parametrize("rank", ["tp_rank", "pp_rank", "attn_cp_rank"])
def test_ranks_with_other_pages_are_told_apart(rank: str) -> None:
    assert place().traits("kv") != place(**{rank: 1}).traits("kv")


def test_engines_of_other_sizes_are_told_apart() -> None:
    assert place().traits("kv") != place(tp_size=2).traits("kv")


def test_ranks_that_hold_the_same_pages_share_them() -> None:
    first, second = place(mla=True), place(mla=True, tp_rank=1)
    assert first.traits("kv") == second.traits("kv") == place(mla=True, tp_size=8).traits("kv")
    assert first.owner("kv") == second.owner("kv") == 0
    assert place(tp_rank=1).owner("kv") == 1


def test_states_differ_between_ranks_also_where_the_kv_does_not() -> None:
    first, second = place(mla=True), place(mla=True, tp_rank=1)
    assert first.traits("mamba") != second.traits("mamba")
    assert first.owner("mamba") != second.owner("mamba")


def test_each_rank_with_pages_of_its_own_has_a_number() -> None:
    owners = {
        place(tp_rank=tp, pp_rank=pp, attn_cp_rank=cp, attn_cp_size=3).owner("kv")
        for tp in range(4)
        for pp in range(2)
        for cp in range(3)
    }
    assert owners == set(range(place(attn_cp_size=3).owners("kv")))


def test_space_is_shared_out_to_ranks_with_pages_of_their_own() -> None:
    assert place().owners("kv") == 8
    assert place(mla=True).owners("kv") == 2
    assert place(mla=True).owners("mamba") == 8


def test_tokens_shared_out_in_decoding_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--dcp-size is 2; allowed .* 1"):
        place(dcp_size=2)
