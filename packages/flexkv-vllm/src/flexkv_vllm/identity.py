# SPDX-License-Identifier: Apache-2.0
"""Everything that determines the bytes of a block apart from its key: model, weights, engine.

Blocks on disk outlive the engine. A later engine finds them only if all of this is the same.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.v1.core import kv_cache_utils

from flexkv.adapter.groups import Groups
from flexkv.adapter.keys import BlockKeys
from flexkv.adapter.weights import digest, file_stamps, weight_files, weights_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger("flexkv.vllm")


def model_identity(vllm_config: VllmConfig) -> list[str]:
    """The parts of the fingerprint. Reads names and times of the model's files, not the
    contents."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return [
        "vllm",
        # Each version of vLLM may order a page's bytes differently.
        vllm.__version__,
        str(vllm_config.attention_config.backend),
        *_cpu_traits(vllm_config),
        str(model.model),
        str(model.revision),
        str(model.dtype),
        str(model.quantization),
        digest([model.hf_config.to_json_string()]),
        _weights(vllm_config),
        str(cache.cache_dtype),
        str(cache.block_size),
        str(cache.prefix_caching_hash_algo),
    ]


def outlives_process(vllm_config: VllmConfig) -> bool:
    """Whether blocks on disk are valid for the next process. If not, the reason is logged."""
    model = vllm_config.model_config
    if not weight_files(model.model, model.revision) and not _is_dummy(vllm_config):
        logger.warning(
            "FlexKV found no weights of %r on this machine, neither in a directory nor in the "
            "Hugging Face cache, and cannot notice when they change; no blocks are kept on disk "
            "or shared",
            model.model,
        )
        return False
    if not _has_stable_hashes(vllm_config):
        logger.warning(
            "vLLM %s names blocks differently in every process; blocks on disk are not found after "
            "a restart; set PYTHONHASHSEED to any fixed number",
            vllm.__version__,
        )
    return True


def _has_stable_hashes(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's block hashes begin with the same seed in every process."""
    if os.environ.get("PYTHONHASHSEED", "random") != "random":
        return True
    fixed_seed = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    return fixed_seed and not vllm_config.cache_config.prefix_caching_hash_algo.startswith("xxhash")


@functools.lru_cache(maxsize=1024)
def _stamp(name: str, path: str) -> bytes:
    # Without local files, FlexKV cannot know whether the next process has the same weights.
    files = weights_in(Path(path)) if Path(path).exists() else []
    known = file_stamps(files) or [secrets.token_hex()]
    return bytes.fromhex(digest([name, path, *known]))


def adapter_stamp(adapter: LoRARequest) -> bytes:
    """16 bytes to append to a key, which distinguish adapters of the same name and path.

    vLLM's hashes contain only name and path. After a restart, they may stand for other weights.
    """
    return _stamp(adapter.lora_name, adapter.lora_path)


def request_stamp(request: Request) -> bytes:
    """The stamp of the request's LoRA adapter; empty if it has none."""
    adapter = request.lora_request
    return b"" if adapter is None else adapter_stamp(adapter)


def block_keys(groups: Groups) -> BlockKeys:
    """Make the keys of a model's blocks."""
    return BlockKeys(groups, request_stamp)


def _weights(vllm_config: VllmConfig) -> str:
    """Digest of names, sizes and times of the model's files."""
    load, model = vllm_config.load_config, vllm_config.model_config
    stamps = file_stamps(weight_files(model.model, model.revision))
    seed = [str(model.seed)] if _is_dummy(vllm_config) else []
    return digest([str(load.load_format), *seed, *stamps])


def _is_dummy(vllm_config: VllmConfig) -> bool:
    return str(vllm_config.load_config.load_format) == "dummy"


def _cpu_traits(vllm_config: VllmConfig) -> list[str]:
    """vLLM's CPU kernels choose a page's inner layout by the available instructions."""
    if vllm_config.device_config.device_type != "cpu":
        return []
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    amx = " amx_tile" in flags
    return [torch.backends.cpu.get_cpu_capability(), f"amx {amx}"]
