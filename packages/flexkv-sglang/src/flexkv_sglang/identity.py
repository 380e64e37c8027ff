# SPDX-License-Identifier: Apache-2.0
"""All that a block's bytes depend on apart from its key: model, weights, engine.

Blocks on disk outlive the engine. An engine finds them again only if all of this is the same.
SGLang's page hashes cover the tokens and, by `extra_key` and `cache_salt`, the tenant and the LoRA
adapter, but nothing of what is here.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from flexkv.engine.weights import (
    adapter_stamps,
    code_traits,
    configuration_digest,
    digest,
    text_of_file,
    weight_files,
    weight_traits,
)

logger = logging.getLogger("flexkv.sglang")

_NAMED = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "torchao_config",
    "attention_backend",
    "prefill_attention_backend",
    "page_size",
)
"""Settings of SGLang that decide the bytes of a page."""


def model_identity(settings: Any, model: Any, version: str) -> list[str]:
    """The parts of the fingerprint, each `NAME: VALUE`. Reads a small part of the model's files;
    see `file_stamps`. Where they lie does not count.

    Args:
        settings: SGLang's resolved settings.
        model: SGLang's configuration of the model.
        version: SGLang's version, because each release may order a page's bytes differently.
    """
    path, revision = str(settings.model_path), settings.revision
    scales = getattr(settings, "quantization_param_path", None)
    return [
        f"engine: sglang {version}",
        *_cpu_traits(settings),
        f"configuration: {configuration_digest(model.hf_config.to_json_string())}",
        *weight_traits(path, revision, str(settings.load_format)),
        *code_traits(path, revision, runs_code=bool(getattr(settings, "trust_remote_code", False))),
        *([f"seed: {settings.random_seed}"] if _is_dummy(settings) else []),
        *(f"{name}: {getattr(settings, name, None)}" for name in _NAMED),
        f"scales: {text_of_file(scales)}",
        f"adapters: {digest(_adapters(settings.lora_paths or ()))}",
    ]


def outlives_process(settings: Any) -> bool:
    """Whether blocks on disk are valid for the next process. If not, the reason is logged."""
    if _is_dummy(settings) or weight_files(str(settings.model_path), settings.revision):
        return True
    logger.warning(
        "FlexKV finds no weights of %r on this machine, neither in a directory nor in the "
        "Hugging Face cache, and cannot tell when they change: no block is kept on disk or "
        "shared",
        settings.model_path,
    )
    return False


def _adapters(references: Iterable[Any]) -> list[str]:
    """The names and files of the LoRA adapters of the command line. SGLang derives adapter ids from
    names and paths alone, so a retrained adapter would find the old one's blocks. Adapters that are
    loaded later have unique ids."""
    parts = []
    for reference in references:
        path = Path(str(reference.lora_path))
        # Without local files, FlexKV cannot know whether the next process has the same weights.
        known = adapter_stamps(path) or [secrets.token_hex()]
        parts += [str(reference.lora_name), *known]
    return parts


def _is_dummy(settings: Any) -> bool:
    return str(settings.load_format) == "dummy"


def _cpu_traits(settings: Any) -> list[str]:
    """The processor's instruction set, by which SGLang's CPU kernels may differ."""
    if settings.device != "cpu":
        return []
    return [f"processor instructions: {torch.backends.cpu.get_cpu_capability()}"]
