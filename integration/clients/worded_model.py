# SPDX-License-Identifier: Apache-2.0
"""A random model with a tokenizer of one token a word, for clients that send texts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from integration.harness.checkpoint import ModelSpec, write_checkpoint
from integration.harness.tokenizers import write_words


class WordedModel(NamedTuple):
    """A model with the words of `harness.tokenizers`.

    Attributes:
        path: its folder.
        kv_bytes_per_token: see `ModelSpec`.
    """

    path: Path
    kv_bytes_per_token: int


def small_model(words: int) -> ModelSpec:
    """A model for clients, with so many tokens."""
    return ModelSpec(
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


def write_worded_model(root: Path, words: int) -> WordedModel:
    """Write one with so many words under `root`."""
    spec = small_model(words)
    path = write_checkpoint(spec, root)
    write_words(path, words)
    return WordedModel(path, spec.kv_bytes_per_token)
