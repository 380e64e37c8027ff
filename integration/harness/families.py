# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of other model families than Llama: what caches KV in other ways.

Run as ``python -m integration.harness.families FAMILY DIRECTORY``; torch and transformers are
needed only there. As in `checkpoint`, the weights are so large that wrong KV changes the tokens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

VOCAB = 2048

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLOWER = 8.0
"""Taken from the logarithm of a recurrent state's decay. With the decay that transformers draws, a
zeroed state changes no token 10 tokens later; with this, tokens still differ after 400."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Five layers with a sliding window, then one of full attention.
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 100},
    ),
    # Two layers with a sliding window, then one of full attention. SGLang keeps the windows in a
    # pool of their own.
    "mellum": (
        "MellumConfig",
        {
            "num_hidden_layers": 9,
            "head_dim": 32,
            "sliding_window": 100,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
            "mlp_layer_types": ["dense"] * 9,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    # Sliding windows only.
    "mistral": ("MistralConfig", {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 100}),
    # Latent attention: one head that all query heads share.
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
        },
    ),
    # Full attention; SGLang divides it over data-parallel ranks.
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 3, "head_dim": 32}),
    # Three layers of linear attention with a recurrent state, then one of full attention.
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    # The same, with dense layers.
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
            # The same said twice: for transformers, and for SGLang.
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "full_attention_interval": 4,
        },
    ),
}
"""Configuration class of transformers, and what it is given beside the common shape."""


def write_family(family: str, root: Path, python: Path = Path(sys.executable)) -> Path:
    """Write a checkpoint of ``family`` under ``root``, in another process of ``python``; return its
    directory."""
    target = root / family
    command = [str(python), "-m", "integration.harness.families", family, str(target)]
    subprocess.run(command, cwd=Path(__file__).resolve().parents[2], check=True)
    return target


def _main(family: str, target: Path) -> None:
    import torch
    import transformers

    name, own = FAMILIES[family]
    config = getattr(transformers, name)(**(_SHAPE | own))
    torch.manual_seed(20260)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter, values in model.named_parameters():
        if parameter.endswith("A_log"):
            values.data -= _SLOWER
    model.save_pretrained(target)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
