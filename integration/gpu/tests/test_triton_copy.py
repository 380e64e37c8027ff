# SPDX-License-Identifier: Apache-2.0
"""The contender's kernel compiles for the devices it is measured on; none is needed for that."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from integration.gpu.triton_copy import CHUNK_WORDS, copy_runs

    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no backend for CUDA")
    signature = dict.fromkeys(("sources", "targets"), "*i64")
    signature |= dict.fromkeys(("runs", "run_words"), "i32") | {"chunk_words": "constexpr"}
    source = ASTSource(copy_runs, signature, {"chunk_words": CHUNK_WORDS[0]})
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(kernel.asm["cubin"]) > 0
    assert "st.global" in kernel.asm["ptx"]
