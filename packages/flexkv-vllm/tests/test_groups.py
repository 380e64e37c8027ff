# SPDX-License-Identifier: Apache-2.0
"""Which KV cache groups are cached."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from kv_pages import LAYERS
from vllm.v1 import kv_cache_interface as interface
from world_config import make_kv_cache_config

from flexkv import LayoutError
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv_vllm import groups

HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.int8}
FULL = interface.FullAttentionSpec(**HEADS)
WINDOW = interface.SlidingWindowSpec(**HEADS, sliding_window=32)


def groups_of(
    config: Any, layers: int = LAYERS, fails_by_request: bool = True, tells_states: bool = True
) -> Groups:
    """The groups of a model with so many layers, in a vLLM that reports so much."""
    vllm_config: Any = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    with mock.patch.multiple(
        groups, fails_by_request=lambda: fails_by_request, tells_states=lambda: tells_states
    ):
        return groups.groups_of(vllm_config, config)


def read_specs(*specs: Any, **changes: Any) -> Groups:
    """Groups of layers of these kinds."""
    config = make_kv_cache_config(8, windows=(32,) * (len(specs) - 1))
    for group, spec in zip(config.kv_cache_groups, specs, strict=True):
        group.kv_cache_spec = spec
    for name in ("prefix_cacheable_group_ids", "hash_block_size"):
        if name in changes:
            vars(config)[name] = changes.pop(name)
    return groups_of(config, **changes)


def spec(kind: type, **fields: Any) -> Any:
    """A spec of that kind, with what this vLLM has of `fields`."""
    return kind(**{n: v for n, v in fields.items() if n in kind.__dataclass_fields__})  # type: ignore[attr-defined]


def read(layers: list[list[str]], flagged: set[int], model_layers: int = LAYERS) -> Groups:
    """Groups with these layers; vLLM says that the `flagged` ones have a draft model's."""
    config = make_kv_cache_config(8, windows=(32,) * (len(layers) - 1))
    for index, (group, names) in enumerate(zip(config.kv_cache_groups, layers, strict=True)):
        group.layer_names = names
        group.is_eagle_group = index in flagged
    return groups_of(config, model_layers)


OWN = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


@pytest.mark.parametrize(
    ("drafts", "cached"),
    [
        (["model.layers.2.self_attn.attn"], False),
        (["model.layers.2.attn", "model.layers.13.attn"], False),
        (["model.layers.2.attn", "model.layers.1.attn"], True),
        (["mtp.layers.0.attn"], True),
        (["draft.attn"], True),
        (["model.layers.2.attn", "draft.attn"], True),
    ],
)
def test_a_group_of_nothing_but_drafts_is_not_cached(drafts: list[str], cached: bool) -> None:
    members = read([OWN, drafts], {1}).members
    assert [group.index for group in members] == ([0, 1] if cached else [0])


def test_numbers_alone_make_no_drafts() -> None:
    groups = read([OWN, ["model.layers.2.self_attn.attn"]], set())
    assert len(groups.members) == 2


@pytest.mark.parametrize("flagged", [{0}, {1}, {0, 1}])
def test_the_models_own_layers_are_cached_wherever_drafts_are(flagged: set[int]) -> None:
    shared = [*OWN, "model.layers.4.self_attn.attn"]
    window = ["model.layers.2.self_attn.attn", "model.layers.3.self_attn.attn"]
    assert len(read([shared, window], flagged, model_layers=4).members) == 2


def test_nothing_but_drafts_is_refused() -> None:
    with pytest.raises(LayoutError, match="no KV cache group of the model can be cached"):
        read([["model.layers.2.self_attn.attn"]], {0})


def test_kinds_of_layers_have_their_reach() -> None:
    chunk = interface.ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=48)
    state = spec(
        interface.MambaSpec,
        block_size=16,
        shapes=((2, 8),),
        dtypes=(torch.int8,),
        mamba_cache_mode="align",
    )
    members = read_specs(FULL, WINDOW, chunk, state).members
    assert [(group.reach, group.span) for group in members] == [
        (Reach.ALL, 0),
        (Reach.WINDOW, 32),
        (Reach.CHUNK, 48),
        (Reach.STATE, 0),
    ]


@pytest.mark.skipif(
    "extra_retained_tokens" not in interface.SlidingWindowSpec.__dataclass_fields__,
    reason="this vLLM retains no tokens behind a window",
)
def test_tokens_retained_behind_a_window_belong_to_it() -> None:
    (group,) = read_specs(replace(WINDOW, extra_retained_tokens=5)).members  # type: ignore[call-arg]
    assert group.span == 37


def test_kinds_that_vllm_derives_are_refused() -> None:
    class OtherFull(interface.FullAttentionSpec):  # type: ignore[misc]
        pass

    class OtherWindow(interface.SlidingWindowSpec):  # type: ignore[misc]
        pass

    for derived in (OtherFull(**HEADS), OtherWindow(**HEADS, sliding_window=32)):
        with pytest.raises(LayoutError, match=f"a group of {type(derived).__name__}; allowed"):
            read_specs(derived)


def test_layers_of_a_group_look_back_equally_far() -> None:
    def uniform(*specs: Any) -> Any:
        names = {f"layer{number}": each for number, each in enumerate(specs)}
        return interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=names)

    (group,) = read_specs(uniform(WINDOW, WINDOW)).members
    assert (group.reach, group.span) == (Reach.WINDOW, 32)
    with pytest.raises(LayoutError, match="layers that look back differently far"):
        read_specs(uniform(WINDOW, replace(WINDOW, sliding_window=64)))


def test_states_are_cached_where_they_can_be() -> None:
    fields: dict[str, Any] = {"block_size": 16, "shapes": ((2, 8),), "dtypes": (torch.int8,)}
    for mode in ("none", "all"):
        with pytest.raises(LayoutError, match=f"cache mode '{mode}'"):
            read_specs(spec(interface.MambaSpec, **fields, mamba_cache_mode=mode))
    state = spec(interface.MambaSpec, **fields, mamba_cache_mode="align")
    with pytest.raises(LayoutError, match="allowed with this vLLM: all except recurrent states"):
        read_specs(FULL, state, tells_states=False)


def test_only_a_plain_model_needs_no_failures_by_request() -> None:
    assert read_specs(FULL, fails_by_request=False).plain
    for specs in ((FULL, WINDOW), (WINDOW,)):
        assert not read_specs(*specs).plain
        with pytest.raises(LayoutError, match="allowed with this vLLM: one group of full"):
            read_specs(*specs, fails_by_request=False)


def test_a_model_beside_a_draft_is_not_plain() -> None:
    groups = read([OWN, ["model.layers.2.self_attn.attn"]], {1})
    assert len(groups.members) == 1
    assert not groups.plain


@pytest.mark.skipif(
    not hasattr(interface.KVCacheConfig, "prefix_cacheable_group_ids"),
    reason="this vLLM does not say which groups it caches",
)
def test_what_vllm_does_not_cache_is_not_cached() -> None:
    assert [group.index for group in read_specs(FULL, WINDOW).members] == [0, 1]
    (member,) = read_specs(FULL, WINDOW, prefix_cacheable_group_ids=(0,)).members
    assert member.index == 0
    with pytest.raises(LayoutError, match="no KV cache group of the model can be cached"):
        read_specs(FULL, WINDOW, prefix_cacheable_group_ids=())


def test_hashes_stand_for_as_many_tokens_as_divide_all_blocks() -> None:
    specs = (replace(FULL, block_size=48), replace(WINDOW, block_size=32))
    assert read_specs(*specs, hash_block_size=None).hash_tokens == 16


def test_models_whose_keys_mean_different_blocks_have_different_names() -> None:
    group = Group(0, Reach.WINDOW, 32, 16, 2)
    others = [
        replace(group, index=1),
        replace(group, reach=Reach.CHUNK),
        replace(group, span=64),
        replace(group, engine_block_tokens=32),
    ]
    names = {Groups((each,), 16).describe() for each in (group, *others)}
    assert len(names) == 5
    assert len({Groups((group,), 16).describe(), Groups((group, group), 16).describe()}) == 2


@pytest.mark.parametrize("reach", Reach)
def test_the_first_block_that_is_needed_holds_the_first_token_that_is_seen(reach: Reach) -> None:
    for span, size, end in itertools.product(range(1, 13), (1, 2, 3), range(30)):
        group = Group(0, reach, span, size, 2)
        seen = {
            Reach.ALL: range(end),
            Reach.WINDOW: range(max(0, end - span + 1), end),
            Reach.CHUNK: range(end // span * span, end),
            Reach.STATE: range(max(0, end - 1), end),
        }[reach]
        if seen:
            assert group.first_needed(end) == seen.start // group.block_tokens
