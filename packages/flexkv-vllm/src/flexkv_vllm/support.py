# SPDX-License-Identifier: Apache-2.0
"""Refuses configurations of vLLM at start that FlexKV does not serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm

from flexkv import LayoutError
from flexkv.engine.scheduler.groups import Groups, Reach
from flexkv_vllm.compat.core import passes_stages_on

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_parallelism(vllm_config: VllmConfig) -> None:
    """Refuse parallelism other than tensor, pipeline and data parallelism. Raises LayoutError if
    vLLM uses another kind, or several schedulers for one model."""
    parallel = vllm_config.parallel_config
    for kind in ("decode", "prefill"):
        size = getattr(parallel, f"{kind}_context_parallel_size", 1)
        if size != 1:
            raise LayoutError(
                f"vLLM's --{kind}-context-parallel-size is {size}; allowed: 1 "
                f"(--tensor-parallel-size and --pipeline-parallel-size are free)"
            )
    stages = parallel.pipeline_parallel_size
    if stages > 1 and not passes_stages_on():
        raise LayoutError(
            f"vLLM's --pipeline-parallel-size is {stages}, and vLLM {vllm.__version__} does not "
            f"pass on the reports of all stages; allowed: 1, or a newer vLLM"
        )
    if stages > 1 and vllm_config.speculative_config is not None:
        # With it, vLLM's first model runner lets only the last stage store blocks.
        raise LayoutError(
            f"vLLM's --pipeline-parallel-size is {stages} with speculative decoding; allowed: 1 "
            f"with speculative decoding, or any size without"
        )
    check_launcher(vllm_config)


def check_stages(vllm_config: VllmConfig, groups: Groups) -> None:
    """Refuse recurrent states that the stages of a pipeline hold. Raises LayoutError if a group has
    recurrent states. vLLM may move a state to its final block only a step later, when it passes the
    last stage's samples to the other stages."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and any(group.reach is Reach.STATE for group in groups.members):
        raise LayoutError(
            f"vLLM's --pipeline-parallel-size is {stages} and the model has recurrent states; "
            f"allowed: 1 for such models (--tensor-parallel-size is free)"
        )


def check_launcher(vllm_config: VllmConfig) -> None:
    """Refuse several schedulers for one model. With an external launcher, each process has its own
    scheduler, and vLLM relies on equal decisions of all. Raises LayoutError if the model has
    several schedulers. Each would see a load end in another step."""
    parallel = vllm_config.parallel_config
    launcher = parallel.distributed_executor_backend
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if launcher == "external_launcher" and ranks > 1:
        raise LayoutError(
            f"vLLM's --distributed-executor-backend is {launcher!r} with {ranks} "
            f"ranks: each rank would have a scheduler of its own, and a load would end in a "
            f"different step of each; allowed: 'mp' or 'ray', where vLLM starts the ranks, or one "
            f"rank"
        )


def check_attention(vllm_config: VllmConfig) -> None:
    """Refuse a model that vLLM cannot compute behind a cached prefix. Raises LayoutError for
    latent attention on a CPU for which vLLM has only its reference kernels. vLLM turns its own
    prefix cache off there, but not those of connectors."""
    on_cpu = vllm_config.device_config.device_type == "cpu"
    cached = vllm_config.cache_config.enable_prefix_caching
    if on_cpu and vllm_config.model_config.use_mla and not cached:
        raise LayoutError(
            "vLLM computes wrong tokens behind a cached prefix of a model with latent attention "
            "(MLA) on this processor; allowed: a GPU, or a CPU with AMX instructions"
        )


def check_pooling(vllm_config: VllmConfig) -> None:
    """Refuse a model whose pooling needs all tokens of a prompt in one step. Raises LayoutError for
    such a model. vLLM turns its own prefix cache off for it, but not those of connectors: a
    worker ends with the first request that has a hit."""
    model = vllm_config.model_config
    pooler = model.pooler_config
    if pooler is None or getattr(model, "is_prefix_caching_supported", True):
        return
    names = ("seq_pooling_type", "tok_pooling_type", "pooling_type")
    kinds = [f"{name} {value}" for name in names if (value := getattr(pooler, name, None))]
    raise LayoutError(
        f"vLLM pools all tokens of a prompt in one step for this model ({', '.join(kinds)}), so "
        f"none may come from a cache; allowed: models that generate, or pooling with which vLLM's "
        f"own prefix cache works, such as LAST"
    )


def check_late_loads(vllm_config: VllmConfig) -> None:
    """Refuse HiSparse, with which vLLM orders loads after the steps that reuse their blocks. Raises
    LayoutError if the engine uses it. FlexKV would copy a load beside such a step."""
    attention = getattr(vllm_config, "attention_config", None)
    if getattr(attention, "hisparse_config", None) is not None:
        raise LayoutError(
            "vLLM's HiSparse is on (hisparse_config of --attention-config), which orders loads "
            "later than FlexKV can follow; allowed: no HiSparse"
        )
