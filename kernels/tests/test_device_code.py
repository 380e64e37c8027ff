# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's tools find the kernels in the library."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import flexkv_kernels
from flexkv_kernels import _library, cuda_unavailable

_IN_TRITON = "backends/nvidia/bin/cuobjdump"


def _cuobjdump() -> str | None:
    """That of a CUDA toolkit, or of Triton."""
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        path = Path(triton.origin).parent / _IN_TRITON
        found = str(path) if path.exists() else None
    return found


@pytest.mark.skipif(_cuobjdump() is None, reason="needs cuobjdump, of a CUDA toolkit or of Triton")
@pytest.mark.skipif(
    "built without CUDA" in (cuda_unavailable() or ""), reason="the library has no kernels"
)
def test_cuobjdump_lists_the_kernels_of_each_target() -> None:
    library = _library.find(list(flexkv_kernels.__path__))
    command = [str(_cuobjdump()), "-lelf", "-lptx", str(library)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for target in (80, 90, 100, 120):
        assert f".sm_{target}.cubin" in listed
    assert re.search(r"\.sm_\d+\.ptx", listed)
