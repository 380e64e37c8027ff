# SPDX-License-Identifier: Apache-2.0
"""Which configurations of vLLM FlexKV serves; all others it refuses at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv import LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_parallelism(vllm_config: VllmConfig) -> None:
    """Refuse parallelism other than tensor and data parallelism.

    Raises:
        LayoutError: vLLM is to use other, or several schedulers for one model.
    """
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise LayoutError(f"vLLM's {name} is {size}; allowed: 1 (tensor_parallel_size is free)")
    check_launcher(vllm_config)


def check_launcher(vllm_config: VllmConfig) -> None:
    """Refuse several schedulers for one model: each process of an external launcher has its own,
    and vLLM relies on all of them deciding alike.

    Raises:
        LayoutError: there are several. They would see loads end in different steps.
    """
    parallel = vllm_config.parallel_config
    launcher, ranks = parallel.distributed_executor_backend, parallel.tensor_parallel_size
    if launcher == "external_launcher" and ranks > 1:
        raise LayoutError(
            f"vLLM's distributed_executor_backend is {launcher!r} with {ranks} tensor-parallel "
            f"ranks: each would have a scheduler of its own, which sees loads end in other steps "
            f"than the others; allowed: 'mp' or 'ray', where vLLM starts the ranks, or one rank"
        )


def check_attention(vllm_config: VllmConfig) -> None:
    """Refuse a model that vLLM cannot compute on with behind a prefix.

    Raises:
        LayoutError: latent attention on a CPU for which vLLM has only its reference kernels. It
            turns its own prefix cache off there, but not those of connectors.
    """
    on_cpu = vllm_config.device_config.device_type == "cpu"
    cached = vllm_config.cache_config.enable_prefix_caching
    if on_cpu and vllm_config.model_config.use_mla and not cached:
        raise LayoutError(
            "vLLM computes wrong tokens behind a cached prefix of a model with latent attention "
            "(MLA) on this processor; allowed: a GPU, or a CPU with AMX instructions"
        )
