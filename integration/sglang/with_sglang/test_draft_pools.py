# SPDX-License-Identifier: Apache-2.0
"""Drafts as SGLang resolves and describes them; without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from flexkv_sglang.identity import model_identity
from flexkv_sglang.pages import draft_of, pages_of

PAGE, HEADS, DIM = 4, 2, 8
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
}
FLAGS = (
    "--device=cpu --attention-backend=torch_native --sampling-backend=pytorch "
    "--grammar-backend=none --skip-tokenizer-init --enable-flexkv "
    "--speculative-num-steps=3 --speculative-eagle-topk=1 "
    "--speculative-num-draft-tokens=4"
)


def pool(layers: int, heads: int = HEADS) -> Any:
    return MHATokenToKVPool(8 * PAGE, PAGE, torch.float16, heads, DIM, layers, "cpu", False)


def params(**drafts: Any) -> Any:
    none = {"mtp_draft_device_pools": (), "sidecar_draft_device_pools": ()}
    return SimpleNamespace(page_size=PAGE, req_to_token_pool=None, **none | drafts)


def resolve(folder: Path, algorithm: str, heads: int = HEADS) -> Any:
    """SGLang's settings for a target and a draft that has this number of KV heads."""
    load_plugins()
    for name, own in (("target", {}), ("draft", {"num_key_value_heads": heads})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(MODEL | own))
    args = [
        f"--model-path={folder / 'target'}",
        f"--speculative-draft-model-path={folder / 'draft'}",
        f"--speculative-algorithm={algorithm}",
        *FLAGS.split(),
    ]
    made = prepare_server_args(args)
    made.resolve_once()
    return made


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "STANDALONE"])
def test_a_draft_is_a_part_of_the_page_and_of_the_fingerprint(
    tmp_path: Path, algorithm: str
) -> None:
    args = resolve(tmp_path, algorithm)
    settings, model = resolving_view(args), model_config_of(args)
    given = params(sidecar_draft_device_pools=(pool(1),))
    draft = draft_of(args, settings, given)
    assert str(draft.model_path) == str(tmp_path / "draft")
    target = pool(3)
    alone = pages_of(target, params(), model, None, 1).layout
    both = pages_of(target, given, model, draft, 1).layout
    assert both.block_bytes == alone.block_bytes // 3 * 4
    assert list(both.starts) == list(alone.starts)
    without = model_identity(settings, model, "0.5.23")
    assert model_identity(settings, model, "0.5.23", draft) != without


@pytest.mark.parametrize(("heads", "replicas"), [(HEADS, 2), (4, 1)])
def test_ranks_share_bytes_only_if_the_drafts_configuration_says_so(
    tmp_path: Path, heads: int, replicas: int
) -> None:
    args = resolve(tmp_path, "EAGLE", heads)
    given = params(mtp_draft_device_pools=(pool(1, 1), pool(1, 1)))
    draft = draft_of(args, resolving_view(args), given)
    pages = pages_of(pool(3, 1), given, model_config_of(args), draft, 4)
    assert pages.sharding.replicas == replicas


def test_settings_without_a_drafts_pools_have_no_draft(tmp_path: Path) -> None:
    args = resolve(tmp_path, "EAGLE")
    assert draft_of(args, resolving_view(args), params()) is None
