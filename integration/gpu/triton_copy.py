# SPDX-License-Identifier: Apache-2.0
"""A copy by a Triton kernel that accesses pinned memory itself, on a few multiprocessors."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

SMS = 12
"""What vLLM's copy of this kind takes."""

CHUNK_WORDS = (512, 2048, 4096)
"""Words of 8 bytes that a program moves at a time; the fastest is taken at each page size."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def copy_runs(  # type: ignore[no-untyped-def]
    sources, targets, runs, run_words, chunk_words: tl.constexpr
):
    lane = tl.arange(0, chunk_words)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        source = tl.load(sources + run).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + run).to(tl.pointer_type(tl.int64))
        for start in range(0, run_words, chunk_words):
            word = start + lane
            inside = word < run_words
            tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


def launch(sources: Any, targets: Any, run_bytes: int, chunk_words: int) -> None:
    """Enqueue the copies of runs on the current stream.

    Args:
        sources, targets: their addresses: int64 tensors in pinned memory.
        run_bytes: a multiple of 8.
        chunk_words: a power of 2.
    """
    grid = (min(SMS, sources.numel()),)
    uploaded = [addresses.to("cuda", non_blocking=True) for addresses in (sources, targets)]
    copy_runs[grid](
        *uploaded, sources.numel(), run_bytes // 8, chunk_words=chunk_words, num_warps=8
    )
