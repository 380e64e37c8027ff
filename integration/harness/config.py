# SPDX-License-Identifier: Apache-2.0
"""What an engine is started with: vLLM's arguments and the environment of its processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.harness.checkpoint import Dtype
from integration.harness.connector import NONE, Connector
from integration.harness.cores import cores_of_ranks

_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is started with; sizes in tokens, blocks and bytes as named.

    ``num_blocks`` overrides how many blocks the KV cache has, whatever ``kv_cache_bytes`` holds.
    ``probe`` adds the worker methods of ``probe.KVProbe``. ``forked`` forks the driver from a
    process that has imported vLLM, and has vLLM fork its processes, its way with GPUs; on CPUs vLLM
    otherwise spawns each, and each imports vLLM for 10 s. A forked engine computes with one thread
    a rank, bound to no core. ``extra_args`` are further keyword arguments of vLLM's
    ``AsyncEngineArgs``.
    """

    model: Path
    dtype: Dtype
    connector: Connector = NONE
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 32
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int = 1 << 30
    tensor_parallel_size: int = 1
    probe: bool = False
    prefix_caching: bool = True
    forked: bool = False
    async_scheduling: bool | None = None
    env: dict[str, str] = field(default_factory=dict)
    extra_args: dict[str, Any] = field(default_factory=dict)

    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``AsyncEngineArgs``."""
        args: dict[str, Any] = {
            "model": str(self.model),
            # Never "auto": it turns a float32 checkpoint into bfloat16.
            "dtype": self.dtype,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": self.prefix_caching,
            "disable_log_stats": False,
            "seed": 0,
        }
        if self.block_size is not None:
            args["block_size"] = self.block_size
        if self.num_blocks is not None:
            args["num_gpu_blocks_override"] = self.num_blocks
        if self.async_scheduling is not None:
            args["async_scheduling"] = self.async_scheduling
        if self.connector.transfer_config is not None:
            args["kv_transfer_config"] = self.connector.transfer_config
        if self.probe:
            args["worker_extension_cls"] = "integration.harness.probe.KVProbe"
        return args | self.extra_args

    def environment(self) -> dict[str, str]:
        """The engine's environment: this process's, what the engine needs, what was asked for."""
        if self.forked:
            env = forked_environment()
        else:
            cores = cores_of_ranks(self.tensor_parallel_size)
            env = _engine_environment() | {"VLLM_CPU_OMP_THREADS_BIND": cores}
        return env | self.connector.env | self.env


def forked_environment() -> dict[str, str]:
    """The environment of every forked engine, and of the server that forks its driver."""
    # OpenMP reads its settings once, and threads that it has begun do not live in a fork.
    return _engine_environment() | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _engine_environment() -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(_REPOSITORY), env.get("PYTHONPATH", "")) if part
    )
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["HF_HUB_OFFLINE"] = "1"
    # vLLM's CPU build keeps one core free of computing threads, and one more as soon as there
    # is any KV connector: engines with and without would not compute with the same number.
    env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    return env
