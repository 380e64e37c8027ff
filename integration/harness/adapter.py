# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters for the random checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from integration.harness.checkpoint import ModelSpec

_RANK = 8
_RANGE = 0.1
"""Standard deviation of the weights: keys and values become others, as large as before."""

_PARTS = ("q_proj", "k_proj", "v_proj")
"""SGLang takes these three together or not at all."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its name and number in vLLM, and its directory."""

    name: str
    number: int
    path: Path


def write_adapter(spec: ModelSpec, root: Path, name: str, number: int) -> Adapter:
    """Write a random adapter for the attention of every layer under ``root``; ``number`` is its
    seed."""
    target = root / name
    target.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _PARTS,
    }
    (target / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(number)
    weights = {}
    for layer in range(spec.layers):
        for part in _PARTS:
            heads = spec.heads if part == "q_proj" else spec.kv_heads
            place = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            for half, shape in (
                ("lora_A", (_RANK, spec.hidden)),
                ("lora_B", (heads * spec.head_dim, _RANK)),
            ):
                drawn = rng.standard_normal(shape, dtype=np.float32)
                weights[f"{place}.{half}.weight"] = drawn * np.float32(_RANGE)
    save_file(weights, target / "adapter_model.safetensors")
    return Adapter(name, number, target)
