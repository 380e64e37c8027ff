# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets in plain torch: a short convolution, and a recurrent state for each head.

Each token is computed alone and in order, so that a prompt gives the same bits in one chunk and in
several. States are read and written in place, in the slots that the caller names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.nn import functional

CHUNK_TOKENS = 64
"""SGLang asks for the state at each multiple of so many tokens of a prompt's new tokens."""

_L2_EPSILON = 1e-6


def causal_conv1d_fn_cpu(  # noqa: PLR0917  (as in sgl_kernel)
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Convolve the new tokens of several prompts with the inputs before them.

    Args:
        x: inputs of all prompts, one after the other, shape (channels, tokens).
        weight: shape (channels, width).
        bias: shape (channels,).
        conv_states: the last inputs of each slot, shape (slots, channels, width - 1); written.
        query_start_loc: first token of each prompt, and the number of tokens.
        seq_lens_cpu: new tokens of each prompt.
        cache_indices: slot of each prompt.
        has_initial_state: whether the slot of each prompt has inputs before these.
        activation: "silu", "swish" or None.
    """
    out = torch.empty_like(x)
    slots, known = cache_indices.tolist(), has_initial_state.tolist()
    for (start, end), slot, starts_warm in zip(_ranges(query_start_loc), slots, known, strict=True):
        state = conv_states[slot]
        before = state if starts_warm else torch.zeros_like(state)
        inputs = torch.cat([before, x[:, start:end]], dim=-1)
        out[:, start:end] = _convolve(inputs, weight, bias, activation)
        state.copy_(inputs[:, -state.shape[-1] :])
    return out


def causal_conv1d_update_cpu(  # noqa: PLR0917  (as in sgl_kernel)
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve one new token of each request, shape (requests, channels); see above."""
    slots = slice(None) if conv_state_indices is None else conv_state_indices.long()
    inputs = torch.cat([conv_state[slots], x.unsqueeze(-1)], dim=-1)
    conv_state[slots] = inputs[..., 1:].to(conv_state.dtype)
    return _convolve(inputs, weight, bias, activation).squeeze(-1)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,  # noqa: N803  (as in sgl_kernel)
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of each token's decay, and how much of it is written; each (1, tokens, heads).

    Args:
        A_log, dt_bias: of each head.
        a, b: projections of the tokens, shape (tokens, heads).
    """
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def chunk_gated_delta_rule_cpu(  # noqa: PLR0917  (as in sgl_kernel)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Let the new tokens of several prompts update the states, and read them.

    Args:
        q, k: of all prompts, one after the other, shape (1, tokens, heads, K).
        v: shape (1, tokens, value heads, V).
        g, beta: of `fused_gdn_gating_cpu`.
        initial_state: the states, shape (slots, value heads, V, K); written.
        initial_state_indices: slot of each prompt.
        cu_seqlens: first token of each prompt, and the number of tokens.
        head_first: must be False.
        use_qk_l2norm_in_kernel: must be True.

    Returns:
        What the tokens read, as `v`; None; and the state before each chunk of each prompt.
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("only tokens first, with norms of queries and keys")
    out = torch.empty_like(v)
    before_chunks: list[torch.Tensor] = []
    slots = initial_state_indices.tolist()
    queries, keys = (_of_value_heads(each, v.shape[2]) for each in (q, k))
    queries = queries * q.shape[-1] ** -0.5
    values, decays, shares = v[0].float(), g[0].float().exp(), beta[0].float()
    for (start, end), slot in zip(_ranges(cu_seqlens), slots, strict=True):
        state = initial_state[slot].to(torch.float32, copy=True)
        for token in range(start, end):
            if (token - start) % CHUNK_TOKENS == 0:
                before_chunks.append(state)
            key = keys[token].unsqueeze(-1)
            state = state * decays[token, :, None, None]
            error = values[token].unsqueeze(-1) - state @ key
            state = state + shares[token, :, None, None] * error @ key.mT
            out[0, token] = (state @ queries[token].unsqueeze(-1)).squeeze(-1)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, torch.stack(before_chunks).unsqueeze(0)


def fused_sigmoid_gating_delta_rule_update_cpu(  # noqa: PLR0917  (as in sgl_kernel)
    A_log: torch.Tensor,  # noqa: N803  (as in sgl_kernel)
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:
    """Both of the above, as decoding calls them."""
    if (softplus_beta, softplus_threshold) != (1.0, 20.0):
        raise NotImplementedError("only softplus as torch has it by default")
    out, _, _ = chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        *fused_gdn_gating_cpu(A_log, a, b, dt_bias),
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return out


def _ranges(starts: torch.Tensor) -> Iterator[tuple[int, int]]:
    bounds: list[int] = starts.tolist()
    return itertools.pairwise(bounds)


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Convolve the last dimension, which loses the first `width - 1` elements."""
    width = weight.shape[-1]
    tokens = inputs.shape[-1] - width + 1
    total = torch.zeros_like(inputs[..., :tokens])
    for tap in range(width):
        total = total + inputs[..., tap : tap + tokens] * weight[:, tap, None]
    if bias is not None:
        total = total + bias[:, None]
    return total if activation is None else functional.silu(total)


def _of_value_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Queries or keys as unit vectors, each repeated for the value heads that share it."""
    unit = x[0].float()
    unit = unit * torch.rsqrt(unit.square().sum(-1, keepdim=True) + _L2_EPSILON)
    return unit.repeat_interleave(heads // unit.shape[1], dim=1)
