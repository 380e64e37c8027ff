# SPDX-License-Identifier: Apache-2.0
"""The ranges that a profiler sees of the CUDA mover."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flexkv_kernels import CudaMode, Direction
from kernels.tests.fake_cuda.fake_driver import FakeCuda, cuda_include, host_compiler

ROOT = Path(__file__).resolve().parents[2]
PROFILER = Path(__file__).parent / "fake_nvtx" / "profiler.cpp"
COPY = """
import sys
from flexkv_kernels import CudaMode, CudaOptions, Direction, Status
from kernels.tests.worlds import simple_world

driver, mode, direction = sys.argv[1:]
world = simple_world(num_blocks=4, page_bytes=4096, n_planes=2, slots=4)
mover = world.cuda_mover(CudaOptions(driver=driver, mode=CudaMode[mode]))
assert mover.wait(mover.submit(Direction[direction], [2], [0]), 60) is Status.DONE
mover.close()
"""


@pytest.fixture(scope="module")
def profiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake-nvtx")
    include = cuda_include(folder)
    if not (include / "nvtx3" / "nvToolsExt.h").is_file():
        pytest.skip(f"no NVTX headers in {include}: builds with this toolkit have no ranges")
    library = folder / "profiler.so"
    command = [*shlex.split(host_compiler()), "-std=c++20", "-fPIC", "-shared", f"-I{include}"]
    subprocess.run([*command, "-o", str(library), str(PROFILER)], check=True)
    return library


def ranges(fake: FakeCuda, profiler: Path, *arguments: str) -> list[tuple[str, int, str]]:
    """Thread, depth and name of each range of a copy, which a process of its own makes."""
    run = subprocess.run(
        [sys.executable, "-c", COPY, fake.path, *arguments],
        cwd=ROOT,
        env={**os.environ, "NVTX_INJECTION64_PATH": str(profiler)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    words = [line.split(maxsplit=3) for line in run.stdout.splitlines()]
    return [(thread, int(depth), name) for _, thread, depth, name in words]


@pytest.mark.parametrize(
    ("mode", "direction", "within"),
    [
        (CudaMode.STAGED, Direction.LOAD, ["copy engines", "scatter"]),
        (CudaMode.STAGED, Direction.STORE, ["gather", "copy engines"]),
        (CudaMode.DMA, Direction.LOAD, ["copy engines"]),
        (CudaMode.KERNEL, Direction.STORE, ["copy kernel"]),
    ],
)
def test_a_profiler_sees_what_calls_are_for(
    fake: FakeCuda, profiler: Path, mode: CudaMode, direction: Direction, within: Sequence[str]
) -> None:
    way = direction.name.lower()
    (submitter, depth, name), *copies = ranges(fake, profiler, mode.name, direction.name)
    assert (depth, name) == (0, f"flexkv: submit {way}")
    expected = [(0, f"flexkv: {way}"), *((1, f"flexkv: {each}") for each in within)]
    assert [(depth, name) for _, depth, name in copies] == expected
    assert {thread for thread, _, _ in copies} == {copies[0][0]} != {submitter}
