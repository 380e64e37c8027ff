# SPDX-License-Identifier: Apache-2.0
"""What SGLang calls as `torch.ops.sgl_kernel.*` for Qwen3.5 on CPUs, in plain torch."""

from __future__ import annotations

import torch

from .mamba import fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply `x` in place by the sigmoid of a gate of as many elements."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(  # noqa: PLR0917  (as in sgl_kernel)
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm queries and keys by their heads; each becomes (rows, head_dim)."""
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(  # noqa: PLR0917  (as in sgl_kernel)
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, of queries that are each followed by the gate of their head."""
    q, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
    norms = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return *norms, gate.contiguous().view(-1, head_dim)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(  # noqa: PLR0917  (as in sgl_kernel)
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split projections (tokens, ...) into queries, keys and values in one, then z, b and a."""
    qkv, z = mixed_qkvz.split(
        [2 * num_heads_qk * head_qk + num_heads_v * head_v, num_heads_v * head_v], dim=-1
    )
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def define() -> None:
    """Have `torch.ops.sgl_kernel` offer these, as SGLang's library does when it is loaded."""
    for function in (
        fused_gdn_gating_cpu,
        fused_qk_gemma_rmsnorm_cpu,
        fused_qk_gemma_rmsnorm_with_gate_cpu,
        fused_qkvzba_split_reshape_cat_contiguous_cpu,
        fused_sigmoid_gating_delta_rule_update_cpu,
        fused_sigmoid_mul_cpu,
    ):
        setattr(torch.ops.sgl_kernel, function.__name__, function)


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, head_dim: int) -> torch.Tensor:
    rows = x.reshape(-1, head_dim).float()
    unit = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (unit * (1 + weight.float())).to(x.dtype)
