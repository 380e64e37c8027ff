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


def test_one_rank_writes_what_all_hold_and_the_others_follow() -> None:
    first, second = place(mla=True), place(mla=True, tp_rank=1)
    assert first.traits("kv") == second.traits("kv") == place(mla=True, tp_size=8).traits("kv")
    assert (first.follows("kv"), second.follows("kv")) == (False, True)
    assert not place(tp_rank=1).follows("kv")


def test_states_differ_between_ranks_also_where_the_kv_does_not() -> None:
    first, second = place(mla=True), place(mla=True, tp_rank=1)
    assert first.traits("mamba") != second.traits("mamba")
    assert not second.follows("mamba")


def test_the_disk_is_shared_out_to_those_that_own_a_folder() -> None:
    assert place().owners("kv") == 8
    assert place(mla=True).owners("kv") == 2
    assert place(mla=True).owners("mamba") == 8


def test_tokens_shared_out_in_decoding_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--dcp-size is 2; allowed .* 1"):
        place(dcp_size=2)
