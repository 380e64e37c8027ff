# SPDX-License-Identifier: Apache-2.0
"""A random model with a tokenizer of one token a word, for clients that send texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from integration.harness.checkpoint import ModelSpec, write_checkpoint

_SPECIAL = ("<unk>", "<s>", "</s>")


class WordedModel(NamedTuple):
    """A model whose words are `w3`, `w4`, and so on, separated by blanks.

    Attributes:
        path: its folder.
        kv_bytes_per_token: see `ModelSpec`.
    """

    path: Path
    kv_bytes_per_token: int


def write_worded_model(root: Path, words: int) -> WordedModel:
    """Write one with so many words under `root`."""
    spec = ModelSpec(
        name="worded",
        hidden=256,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=768,
        vocab=words,
        dtype="float32",
        init_range=0.25,
    )
    path = write_checkpoint(spec, root)
    vocabulary = {word: number for number, word in enumerate(_SPECIAL)}
    vocabulary |= {f"w{number}": number for number in range(len(_SPECIAL), words)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, word in enumerate(_SPECIAL)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _SPECIAL[0]},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return WordedModel(path, spec.kv_bytes_per_token)
