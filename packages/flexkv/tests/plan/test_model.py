# SPDX-License-Identifier: Apache-2.0
"""Bytes a token, against what is known of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexkv.plan.model import read_model
from flexkv.types.errors import TraceError

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
FALCON_7B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_size": 4544,
    "multi_query": True,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}
GPT_OSS_20B = {
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
MISTRAL_7B = LLAMA_8B | {"sliding_window": 4096}
QWEN2 = LLAMA_8B | {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
QWEN3_NEXT = LLAMA_8B | {
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
}


def model_file(tmp_path: Path, config: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "dtype", "token_bytes"),
    [
        (LLAMA_8B, "auto", 131072),
        (LLAMA_8B, "fp8", 65536),
        (LLAMA_8B, "float32", 262144),
        (LLAMA_8B | {"torch_dtype": "float32"}, "auto", 131072),
        (LLAMA_8B | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "auto", 65536),
        (LLAMA_8B | {"quantization_config": {"kv_cache_quant_algo": "fp8"}}, "auto", 65536),
        (LLAMA_8B | {"quantization_config": {"bits": 4}}, "auto", 131072),
        (LLAMA_8B | {"num_key_value_heads": [8] * 31 + [4]}, "auto", 131072 - 2048),
        (LLAMA_8B | {"num_kv_shared_layers": 16}, "auto", 65536),
        (GPT2, "auto", 12 * 768 * 2 * 2),
        (FALCON_7B, "auto", 32 * 64 * 2 * 2),
        (DEEPSEEK_V3, "auto", 70272),
        (DEEPSEEK_V3 | {"index_head_dim": 128}, "auto", 70272 + 61 * 132),
        (QWEN2, "auto", 131072),
        (QWEN3_NEXT, "auto", 12 * 2 * 256 * 2 * 2),
    ],
)
def test_bytes_of_known_models(
    tmp_path: Path, config: dict[str, object], dtype: str, token_bytes: int
) -> None:
    model = read_model(str(model_file(tmp_path, config)), dtype)
    assert model.window_bytes == 0
    assert model.token_bytes(5000) == token_bytes


def test_windows_are_stored_at_the_ends_of_prompts(tmp_path: Path) -> None:
    gemma = read_model(str(model_file(tmp_path, GEMMA3_27B).parent))
    layer = 16 * 128 * 2 * 2
    assert (gemma.full_bytes, gemma.window_bytes) == (10 * layer, 52 * layer)
    assert gemma.token_bytes(512) == 62 * layer
    assert gemma.token_bytes(10240) == 10 * layer + 5.2 * layer
    oss = read_model(str(model_file(tmp_path, GPT_OSS_20B)))
    assert oss.full_bytes == oss.window_bytes == 12 * 8 * 64 * 2 * 2
    assert oss.window_tokens == 128


def test_a_model_of_windows_alone_stores_all(tmp_path: Path) -> None:
    mistral = read_model(str(model_file(tmp_path, MISTRAL_7B)))
    assert mistral.token_bytes(1_000_000) == 131072


def test_layers_without_attention_are_told(tmp_path: Path) -> None:
    assert read_model(str(model_file(tmp_path, QWEN3_NEXT))).stateful_layers == 36


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        # Weights of a layer by those of its attention scores: 218,103,808 by 32 x 2 x 128.
        (LLAMA_8B | {"intermediate_size": 14336}, 26624),
        (LLAMA_8B, (41943040 + 8 * 4096**2) / 8192),
        (
            LLAMA_8B | {"moe_intermediate_size": 1024, "num_experts_per_tok": 8},
            (41943040 + 24 * 4096 * 1024) / 8192,
        ),
        (DEEPSEEK_V3 | {"q_lora_rank": 1536, "intermediate_size": 18432}, None),
        (LLAMA_8B | {"hidden_size": None, "head_dim": 128}, None),
        (QWEN3_NEXT | {"intermediate_size": 5120}, None),
    ],
)
def test_the_position_where_attention_costs_as_much_as_all_else(
    tmp_path: Path, config: dict[str, object], tokens: float | None
) -> None:
    found = read_model(str(model_file(tmp_path, config))).attention_tokens
    if tokens is not None:
        assert found == tokens
    elif config.get("hidden_size") is None:
        assert found is None
    elif "kv_lora_rank" in config:
        attention = (7168 + 128 * 192) * 1536 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
        assert found == (attention + 3 * 7168 * 18432) / (128 * 320)
    else:  # one layer of four has attention
        weights = 4096 * 256 * (32 + 4) + 32 * 256 * 4096 + 3 * 4096 * 5120
        assert found == 4 * weights / (32 * 512)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "holds no object"),
        ({}, "num_hidden_layers is missing"),
        (LLAMA_8B | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA_8B | {"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        (LLAMA_8B | {"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        (LLAMA_8B | {"num_key_value_heads": [8]}, r"num_key_value_heads is \[8\]"),
        (LLAMA_8B | {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA_8B | {"num_key_value_heads": [-8] * 32}, r"num_key_value_heads is \[-8"),
        (LLAMA_8B | {"num_attention_heads": 1 << 40}, "num_attention_heads is"),
        (LLAMA_8B | {"num_kv_shared_layers": 32}, "no layer that keeps keys and values"),
        (
            LLAMA_8B | {"num_kv_shared_layers": 33, "num_key_value_heads": [8] * 34},
            "no layer that keeps keys and values",
        ),
        (LLAMA_8B | {"layer_types": ["mamba"] * 32}, "no layer that keeps keys and values"),
    ],
)
def test_a_configuration_that_does_not_say_enough_is_one_error(
    tmp_path: Path, config: object, says: str
) -> None:
    with pytest.raises(TraceError, match=f"{says}.*; allowed: "):
        read_model(str(model_file(tmp_path, config)))
