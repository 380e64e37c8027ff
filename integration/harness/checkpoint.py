# SPDX-License-Identifier: Apache-2.0
"""Random Llama checkpoints on disk: no download, the same bytes for the same spec.

vLLM's own dummy weights are so small that attention hardly matters: with them an engine gives the
same tokens over a zeroed KV cache. The weights written here are large enough for every cached row
to count (see ``ModelSpec.init_range``), so equal tokens say something about the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Dtype = Literal["float32", "bfloat16"]

_SAFETENSORS_DTYPE: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16"}
# Part of the directory's name: a change of how weights are drawn must not meet old directories.
_RECIPE = 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape, precision and seed of a random Llama model.

    ``init_range`` is the standard deviation of the normal distribution that the weights are drawn
    from, the embedding and the output layer included.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype: Dtype
    init_range: float
    max_position: int = 32768
    seed: int = 20260

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        itemsize = 4 if self.dtype == "float32" else 2
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


TINY = ModelSpec(
    name="tiny",
    hidden=128,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=256,
    vocab=2048,
    dtype="float32",
    init_range=0.25,
)

BENCH = ModelSpec(
    name="bench",
    hidden=512,
    layers=8,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=1536,
    vocab=32000,
    dtype="bfloat16",
    init_range=0.05,
)


def write_checkpoint(spec: ModelSpec, root: Path) -> Path:
    """Write the checkpoint of ``spec`` under ``root`` unless it is there; return its directory.

    The directory's name holds a digest of the spec, so one root serves all specs. It appears by a
    rename once it is complete: two callers may race, and a killed one leaves no half checkpoint.
    """
    digest = hashlib.blake2b(
        json.dumps([_RECIPE, asdict(spec)], sort_keys=True).encode(), digest_size=6
    ).hexdigest()
    target = root / f"{spec.name}-{digest}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    draft = root / f".{target.name}.{os.getpid()}"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(_hf_config(spec), indent=2))
    _write_safetensors(draft / "model.safetensors", spec)
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(draft)
    return target


def write_config(spec: ModelSpec, root: Path) -> Path:
    """Write a model without weights under ``root``, for vLLM's dummy ones; return its directory."""
    target = root / f"{spec.name}-dummy"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(_hf_config(spec), indent=2))
    return target


def _hf_config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": spec.dtype,
    }


def _shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (spec.hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (query, spec.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (key, spec.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (key, spec.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (spec.hidden, query)
        yield f"{prefix}.post_attention_layernorm.weight", (spec.hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (spec.intermediate, spec.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (spec.intermediate, spec.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (spec.hidden, spec.intermediate)
    yield "model.norm.weight", (spec.hidden,)
    yield "lm_head.weight", (spec.vocab, spec.hidden)


def _write_safetensors(path: Path, spec: ModelSpec) -> None:
    # Written by hand: numpy has no bfloat16, and torch must not be needed to write a checkpoint.
    itemsize = 4 if spec.dtype == "float32" else 2
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in _shapes(spec):
        size = int(np.prod(shape)) * itemsize
        header[name] = {
            "dtype": _SAFETENSORS_DTYPE[spec.dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(spec.seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, shape in _shapes(spec):
            if len(shape) == 1:
                weights = np.ones(shape, dtype=np.float32)
            else:
                weights = rng.standard_normal(shape, dtype=np.float32)
                weights *= np.float32(spec.init_range)
            file.write(_encode(weights, spec.dtype))


def _encode(weights: npt.NDArray[np.float32], dtype: Dtype) -> bytes:
    if dtype == "float32":
        return weights.tobytes()
    # bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    bits = weights.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16).tobytes()
