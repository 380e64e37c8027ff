# SPDX-License-Identifier: Apache-2.0
"""What the copy kernels take of a multiprocessor, by NVIDIA's assembler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[1]

FLASH_ATTENTION_3 = 384 * 168
"""Registers of its block, which has a multiprocessor to itself but for the rest of 65,536."""


@pytest.mark.parametrize("processor", [90, 100])
def test_a_warp_of_the_bulk_kernel_fits_beside_attention(tmp_path: Path, processor: int) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    done = subprocess.run(
        [
            nvcc,
            "-std=c++17",
            "-O3",
            f"-gencode=arch=compute_{processor},code=sm_{processor}",
            "-cubin",
            "-Xptxas=-v",
            f"-I{KERNELS / 'src'}",
            "-o",
            str(tmp_path / "kernels.cubin"),
            str(KERNELS / "cuda" / "kernels.cu"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"'fkv_copy_bulk'.*?(\d+) bytes spill stores.*?Used (\d+)", done.stderr, re.S)
    assert found is not None, done.stderr
    spilled, registers = map(int, found.groups())
    assert spilled == 0
    taken = -(-registers // 8) * 8 * 32  # a warp's are given in units of 8 a thread
    assert taken <= 65_536 - FLASH_ATTENTION_3
