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

from flexkv.adapter.weights import adapter_stamps, digest, file_stamps, weight_files

logger = logging.getLogger("flexkv.sglang")

_NAMED = (
    "model_path",
    "revision",
    "dtype",
    "quantization",
    "load_format",
    "kv_cache_dtype",
    "quantization_param_path",
    "torchao_config",
    "attention_backend",
    "prefill_attention_backend",
    "page_size",
)
"""Settings of SGLang that decide the bytes of a page."""


def model_identity(settings: Any, model: Any, version: str) -> list[str]:
    """The parts of the fingerprint. Reads names and times of the model's files, not their contents.

    Args:
        settings: SGLang's resolved settings.
        model: SGLang's configuration of the model.
        version: SGLang's version, because each release may order a page's bytes differently.
    """
    stamps = file_stamps(weight_files(str(settings.model_path), settings.revision))
    seed = [str(settings.random_seed)] if _is_dummy(settings) else []
    return [
        "sglang",
        version,
        *(f"{name} {getattr(settings, name, None)}" for name in _NAMED),
        *_cpu_traits(settings),
        digest([model.hf_config.to_json_string()]),
        digest([*seed, *stamps]),
        digest(_adapters(settings.lora_paths or ())),
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
    """The names, paths and files of the LoRA adapters of the command line. SGLang derives adapter
    ids from names and paths alone, so a retrained adapter would find the old one's blocks. Adapters
    that are loaded later have unique ids."""
    parts = []
    for reference in references:
        path = Path(str(reference.lora_path))
        # Without local files, FlexKV cannot know whether the next process has the same weights.
        known = adapter_stamps(path) or [secrets.token_hex()]
        parts += [str(reference.lora_name), str(path), *known]
    return parts


def _is_dummy(settings: Any) -> bool:
    return str(settings.load_format) == "dummy"


def _cpu_traits(settings: Any) -> list[str]:
    """The processor's instruction set, by which SGLang's CPU kernels may differ."""
    return [torch.backends.cpu.get_cpu_capability()] if settings.device == "cpu" else []
