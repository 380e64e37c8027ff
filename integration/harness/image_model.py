# SPDX-License-Identifier: Apache-2.0
"""A random model that reads images (Qwen2-VL), and random images for it.

Run as ``python -m integration.harness.image_model DIRECTORY``; torch and transformers are needed
only there. Its KV has the shape of `checkpoint.TINY`.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from integration.harness.checkpoint import TINY
from integration.harness.tokenizers import SPECIAL, write_words

_BEGIN, _END, _IMAGE, _VIDEO = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_WORDS = (*SPECIAL, _BEGIN, _END, _IMAGE, _VIDEO)
FIRST_WORD = len(_WORDS)
"""The least number of a word that is not special."""

IMAGE = f"{_BEGIN}{_IMAGE}{_END}"
"""Stands for an image in a text."""

_PATCH, _MERGED = 14, 2
SIDE = _PATCH * _MERGED
"""Pixels along each side of the square that becomes one token."""

_MOST_TOKENS = 256


def write_image_model(root: Path) -> Path:
    """Write the checkpoint under ``root``, in another process; return its directory."""
    target = root / "qwen2_vl"
    command = [sys.executable, "-m", "integration.harness.image_model", str(target)]
    subprocess.run(command, cwd=Path(__file__).resolve().parents[2], check=True)
    return target


def random_image(seed: int, width: int, height: int) -> str:
    """A PNG of so many tokens along each side, base64 encoded. Each square has one colour."""
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours.repeat(SIDE, 0).repeat(SIDE, 1)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _main(target: Path) -> None:
    import torch
    import transformers

    number = {word: number for number, word in enumerate(_WORDS)}
    text = {
        "vocab_size": TINY.vocab,
        "hidden_size": TINY.hidden,
        "intermediate_size": TINY.intermediate,
        "num_hidden_layers": TINY.layers,
        "num_attention_heads": TINY.heads,
        "num_key_value_heads": TINY.kv_heads,
        "max_position_embeddings": TINY.max_position,
        "initializer_range": TINY.init_range,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
    }
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": TINY.hidden,
        "num_heads": 2,
        "mlp_ratio": 2,
        "initializer_range": TINY.init_range,
        "in_chans": 3,  # SGLang's name, beside that of transformers
    }
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=number[_BEGIN],
        vision_end_token_id=number[_END],
        image_token_id=number[_IMAGE],
        video_token_id=number[_VIDEO],
        tie_word_embeddings=False,
    )
    torch.manual_seed(TINY.seed)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(target)
    write_words(target, TINY.vocab, _WORDS)
    sizes = {"patch_size": _PATCH, "temporal_patch_size": 2, "merge_size": _MERGED}
    limits = {"min_pixels": SIDE**2, "max_pixels": _MOST_TOKENS * SIDE**2}
    common = {"processor_class": "Qwen2VLProcessor", **sizes, **limits}
    for name, kind in (("", "image"), ("video_", "video")):
        own = {f"{kind}_processor_type": f"Qwen2VL{kind.capitalize()}Processor"}
        file = target / f"{name}preprocessor_config.json"
        file.write_text(json.dumps(common | own))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
