# SPDX-License-Identifier: Apache-2.0
"""What an engine computes while copies go on: a large matrix product, and a prefill's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from integration.gpu.device import Gpu, Stream
from integration.gpu.lab import Lab
from integration.gpu.results import Log

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
"""Of the attention: those of Llama 3.1 8B."""

Once = Callable[[], object]
"""Puts one computation into the current stream."""


@dataclass(frozen=True, slots=True)
class Work:
    """A computation that is repeated.

    Attributes:
        name: in the rows of the report.
        kernel: what computes it.
        flops: floating point operations of one.
        once: puts one into the current stream.
        count: repeats in one measurement.
        gpu: the device.
        stream: of the computation.
    """

    name: str
    kernel: str
    flops: float
    once: Once
    count: int
    gpu: Gpu
    stream: Stream

    def seconds(self) -> float:
        """Of one, by the device's clock, the mean of many."""
        with self.stream.current():
            self.once()
        return self.gpu.seconds(self.stream, self._repeat) / self.count

    def _repeat(self) -> None:
        for _ in range(self.count):
            self.once()


def product(lab: Lab, log: Log) -> Work:
    """bf16 [n, n] times the same, of random numbers, into memory that is there already."""
    n = lab.sizes.matrix
    first, second = (_random(lab, n, n) for _ in range(2))
    result = torch.empty_like(first)

    def once() -> None:
        torch.mm(first, second, out=result)

    kernel = f"bf16, {n} x {n} x {n}"
    return _ready(lab, "matrix product", kernel, 2.0 * n**3, once)


def attention(lab: Lab, log: Log) -> Work:
    """Causal attention of one prompt in bf16, by the first of these kernels that runs here."""
    tokens = lab.sizes.attention_tokens
    query = _random(lab, tokens, HEADS, HEAD_SIZE)
    key, value = (_random(lab, tokens, KV_HEADS, HEAD_SIZE) for _ in range(2))
    chosen, once = first_that_runs(lab.gpu, query, key, value, log)
    flops = 2.0 * tokens**2 * HEADS * HEAD_SIZE  # half of the pairs
    kernel = f"{chosen}, causal, bf16, {tokens:,} tokens, {HEADS} heads"
    return _ready(lab, "attention", kernel, flops, once)


WORKS: dict[str, Callable[[Lab, Log], Work]] = {
    "matrix product": product,
    "attention": attention,
}
"""By name."""


def first_that_runs(
    gpu: Gpu, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log: Log
) -> tuple[str, Once]:
    """The name of a kernel, and the computation; the reasons against faster ones are noted.

    Raises:
        Exception: torch's own attention does not run either.
    """
    for name, make in KERNELS.items():
        try:
            once = make(query, key, value)
            once()
            gpu.synchronize()
        except Exception as error:
            if name == TORCH:
                raise
            log.note(f"no {name}: {type(error).__name__}: {error}")
        else:
            return name, once
    raise AssertionError("torch's attention is one of the kernels")


def _fa3_of_vllm(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Once:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    tokens = query.shape[0]
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=query.device)

    def once() -> object:
        return flash_attn_varlen_func(
            query,
            key,
            value,
            max_seqlen_q=tokens,
            cu_seqlens_q=ends,
            max_seqlen_k=tokens,
            cu_seqlens_k=ends,
            causal=True,
            fa_version=3,
        )

    return once


def _fa3(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Once:
    from flash_attn_interface import flash_attn_func

    batch = [tensor[None] for tensor in (query, key, value)]
    return lambda: flash_attn_func(*batch, causal=True)


def _torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Once:
    by_head = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    repeated = [by_head[0], *(t.repeat_interleave(HEADS // KV_HEADS, 1) for t in by_head[1:])]
    compute = torch.nn.functional.scaled_dot_product_attention
    return lambda: compute(*repeated, is_causal=True)


TORCH = "torch's scaled_dot_product_attention"
KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Once]] = {
    "FlashAttention 3 of vLLM": _fa3_of_vllm,
    "FlashAttention 3": _fa3,
    TORCH: _torch,
}
"""By name, those that engines use first."""


def _random(lab: Lab, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=lab.gpu.memory, dtype=torch.bfloat16)


def _ready(lab: Lab, name: str, kernel: str, flops: float, once: Once) -> Work:
    lab.gpu.synchronize()
    return Work(name, kernel, flops, once, lab.sizes.products, lab.gpu, lab.gpu.stream())
