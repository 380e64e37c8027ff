# SPDX-License-Identifier: Apache-2.0
"""Which KV cache groups are cached."""

from __future__ import annotations

import pytest
from kv_pages import LAYERS
from world_config import make_kv_cache_config

from flexkv import LayoutError
from flexkv_vllm.groups import Groups, read_groups


def read(layers: list[list[str]], flagged: set[int], model_layers: int = LAYERS) -> Groups:
    """Groups with these layers; vLLM says that the `flagged` ones have a draft model's."""
    config = make_kv_cache_config(8, windows=(32,) * (len(layers) - 1))
    for index, (group, names) in enumerate(zip(config.kv_cache_groups, layers, strict=True)):
        group.layer_names = names
        group.is_eagle_group = index in flagged
    return read_groups(
        config, 16, 1, model_layers=model_layers, fails_by_request=True, tells_states=True
    )


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
