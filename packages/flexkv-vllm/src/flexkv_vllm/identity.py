# SPDX-License-Identifier: Apache-2.0
"""Everything that determines the bytes of a block apart from its key: model, weights, engine.

Blocks on disk outlive the engine. A later engine finds them only if all of this is the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.v1.core import kv_cache_utils

from flexkv.engine.weights import (
    code_traits,
    configuration_digest,
    digest,
    file_digests,
    processor_files,
    tokenizer_files,
    weight_files,
    weight_traits,
)
from flexkv_vllm.counted_settings import counted_settings, counted_variables

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = logging.getLogger("flexkv.vllm")

_RANDOM = "random"
"""Stands for a seed that each process draws for itself, as in PYTHONHASHSEED."""

_DUMMY = "dummy"
"""vLLM's `--load-format` of random weights, which depend on its seed."""

_FROM_FILES_NAMES = """
    auto bitsandbytes dummy fastsafetensors gguf hf instanttensor mistral npcache pt runai_streamer
    runai_streamer_sharded safetensors sharded_state
"""
_FROM_FILES = frozenset(_FROM_FILES_NAMES.split())
"""vLLM's `--load-format` of weights that are only those of the model's files, or of a seed."""

_DRAFTS_WITHOUT_PAGES = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""vLLM's methods of speculative decoding that keep no KV."""


def model_identity(vllm_config: VllmConfig) -> list[str]:
    """The parts of the fingerprint, each `NAME: VALUE`. Reads a small part of the model's files;
    see `file_stamps`. Where they lie does not count."""
    return [
        # Each version of vLLM may order a page's bytes differently.
        f"engine: vllm {vllm.__version__}",
        *_cpu_traits(vllm_config),
        *_weights(vllm_config.model_config, vllm_config.load_config),
        *counted_settings(vllm_config),
        *counted_variables(),
        *_adapter_traits(vllm_config),
        *_draft_traits(vllm_config),
        *_length_traits(vllm_config),
        *_processor_traits(vllm_config),
        f"hash seed: {_hash_seed(vllm_config)}",
    ]


def served_model(vllm_config: VllmConfig) -> str:
    """The name by which vLLM serves the model; the first one of several."""
    model = vllm_config.model_config
    names = model.served_model_name or model.model
    return str(names if isinstance(names, str) else names[0])


def outlives_process(vllm_config: VllmConfig) -> bool:
    """Whether blocks on disk are valid for the next process. If not, the reason is logged."""
    for model, load in _models(vllm_config):
        load_format = str(load.load_format)
        if load_format not in _FROM_FILES or getattr(model, "model_weights", None):
            logger.warning(
                "FlexKV cannot notice when the weights of %r change, which vLLM loads by "
                "--load-format %r from elsewhere than the model's files; no blocks are kept on "
                "disk or shared",
                model.model,
                load_format,
            )
            return False
        if load_format != _DUMMY and not weight_files(model.model, model.revision):
            logger.warning(
                "FlexKV found no weights of %r on this machine, neither in a directory nor in the "
                "Hugging Face cache, and cannot notice when they change; no blocks are kept on "
                "disk or shared",
                model.model,
            )
            return False
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # before vLLM 0.32
        logger.warning(
            "--calculate-kv-scales: vLLM scales its KV cache by the first prompts of each process; "
            "no blocks are kept on disk or shared; use a checkpoint that has scales"
        )
        return False
    if _counts_media(vllm_config):
        logger.warning(
            "vLLM numbers images, video and sound anew in each process, because its prefix cache "
            "and its processor cache are off; no blocks are kept on disk or shared; turn on "
            "--enable-prefix-caching, or set --mm-processor-cache-gb above 0"
        )
        return False
    if _hash_seed(vllm_config) == _RANDOM:
        logger.warning(
            "vLLM %s names blocks differently in every process; blocks on disk are not found after "
            "a restart; set PYTHONHASHSEED to any fixed number",
            vllm.__version__,
        )
    return True


def shares_blocks(vllm_config: VllmConfig) -> bool:
    """Whether other engines can find blocks of this one. If not, the reason is logged."""
    if _hash_seed(vllm_config) != _RANDOM:
        return True
    logger.warning(
        "vLLM %s names blocks differently in every process; no blocks are kept in shared stores; "
        "set PYTHONHASHSEED to one fixed number on all nodes",
        vllm.__version__,
    )
    return False


def _hash_seed(vllm_config: VllmConfig) -> str:
    """The seed that all of vLLM's block hashes begin with; `_RANDOM` if each process has its own.
    Engines with different seeds have no key in common."""
    seed = os.environ.get("PYTHONHASHSEED", _RANDOM)
    if seed != _RANDOM:
        return seed
    fixed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", _RANDOM)
    cryptographic = not vllm_config.cache_config.prefix_caching_hash_algo.startswith("xxhash")
    return str(fixed) if cryptographic else _RANDOM


def _models(vllm_config: VllmConfig) -> Iterator[tuple[ModelConfig, LoadConfig]]:
    """The model, and a draft model that keeps KV, with the way in which vLLM loads each."""
    yield vllm_config.model_config, vllm_config.load_config
    drafts = vllm_config.speculative_config
    if drafts is None or drafts.method in _DRAFTS_WITHOUT_PAGES:
        return
    if drafts.draft_model_config is not None:
        load = getattr(drafts, "draft_load_config", None)
        yield drafts.draft_model_config, load or vllm_config.load_config


def _weights(model: ModelConfig, load: LoadConfig) -> list[str]:
    """A model's configuration, weights and code. Dummy weights are those of their seed."""
    runs_code = bool(getattr(model, "trust_remote_code", False))
    return [
        f"configuration: {configuration_digest(model.hf_config.to_json_string())}",
        *weight_traits(model.model, model.revision, str(load.load_format)),
        *([f"seed: {model.seed}"] if str(load.load_format) == _DUMMY else []),
        *code_traits(model.model, model.revision, runs_code=runs_code),
    ]


def _draft_traits(vllm_config: VllmConfig) -> list[str]:
    """The draft model's weights, and the settings that change its pages."""
    _, *drafts = _models(vllm_config)
    if not drafts:
        return []
    ((model, load),) = drafts
    traits = [*_weights(model, load), *counted_settings(model)]
    settings = counted_settings(vllm_config.speculative_config)
    return [f"draft {trait}" for trait in traits] + [f"drafts {trait}" for trait in settings]


def _adapter_traits(vllm_config: VllmConfig) -> list[str]:
    """How vLLM applies LoRA adapters, if not as their files say."""
    lora = vllm_config.lora_config
    if lora is None:
        return []
    traits = [f"adapters: {trait}" for trait in counted_settings(lora, but=(None, False))]
    if lora.lora_dtype not in ("auto", vllm_config.model_config.dtype):
        traits.append(f"dtype of adapters: {lora.lora_dtype}")
    modules = getattr(lora, "target_modules", None)
    if modules is not None:
        traits.append(f"modules of adapters: {sorted(modules)}")
    return traits


def _length_traits(vllm_config: VllmConfig) -> list[str]:
    """With LongRoPE, vLLM chooses the factors of all positions by the longest context."""
    model = vllm_config.model_config
    is_longrope = '"longrope"' in model.hf_config.to_json_string()
    return [f"longest context: {model.max_model_len}"] if is_longrope else []


def _processor_traits(vllm_config: VllmConfig) -> list[str]:
    """The files by which vLLM normalizes tokens, and prepares images, video and sound."""
    model = vllm_config.model_config
    files = tokenizer_files(
        str(model.tokenizer or model.model), model.tokenizer_revision or model.revision
    )
    if model.multimodal_config is not None:
        files += processor_files(model.model, model.revision)
    return [f"processor: {digest(file_digests(files))}"]


def _counts_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names images, video and sound by a count instead of their content. Another
    process has the same names for other content."""
    media = vllm_config.model_config.multimodal_config
    if media is None or vllm_config.cache_config.enable_prefix_caching:
        return False
    return bool(media.mm_processor_cache_gb == 0)


def _cpu_traits(vllm_config: VllmConfig) -> list[str]:
    """vLLM's CPU kernels choose a page's inner layout by the available instructions."""
    if vllm_config.device_config.device_type != "cpu":
        return []
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    amx = " amx_tile" in flags
    return [f"processor instructions: {torch.backends.cpu.get_cpu_capability()}, amx {amx}"]
