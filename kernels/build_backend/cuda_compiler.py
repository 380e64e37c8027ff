# SPDX-License-Identifier: Apache-2.0
"""Which nvcc a build of the kernels takes, if any."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

COMPILER = [
    f"{name}==13.0.*"  # the wheels of older toolkits have no nvcc; parts must be of one toolkit
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-cuda-crt",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
        "nvidia-nvtx",  # headers
    )
]
"""Requirements that put an nvcc into a build's environment: about 100 MB to download."""

HOMES = ("CUDA_HOME", "CUDA_PATH")
DEFAULT_HOME = "/usr/local/cuda"

_TRIAL = """#include <cudaTypedefs.h>
#if CUDA_VERSION < 12080
#error "older than CUDA 12.8"
#endif
__global__ void nothing() {}
"""


class NoCompilerError(Exception):
    """CUDA is wanted and there is no nvcc; the message says what to do."""


def required(defined: Mapping[str, str]) -> list[str]:
    """What must be installed for a build with these definitions for CMake."""
    return COMPILER if _decides(defined) and _installed() is None else []


def definitions(defined: Mapping[str, str]) -> dict[str, str]:
    """What a build adds to its definitions for CMake.

    Raises:
        NoCompilerError: see there.
    """
    if not _decides(defined):
        return {} if "FLEXKV_CUDA" in defined or has_cuda() else {"FLEXKV_CUDA": "OFF"}
    nvcc = _installed() or _fetched()
    if nvcc is None:
        raise NoCompilerError(
            "flexkv-kernels is built with CUDA, and no nvcc of CUDA 12.8 or newer that works is on"
            f" the PATH, in CUDA_HOME or in {DEFAULT_HOME}. Build with pip's build isolation, or"
            f" install {' '.join(COMPILER)}, or leave CUDA out with"
            " -C cmake.define.FLEXKV_CUDA=OFF."
        )
    return {"FLEXKV_CUDA": "ON", "FKV_NVCC": nvcc}


def has_cuda() -> bool:
    """Whether NVIDIA makes drivers, and PyPI has nvcc, for this kind of machine."""
    return (
        sys.platform == "linux"
        and platform.machine() in {"x86_64", "aarch64"}
        and platform.libc_ver()[0] == "glibc"
    )


def _decides(defined: Mapping[str, str]) -> bool:
    """Whether an nvcc is looked for here: CMake does it where the user says AUTO or names one."""
    wanted = defined.get("FLEXKV_CUDA", "ON").upper() in {"ON", "1", "TRUE", "YES"}
    return wanted and "FKV_NVCC" not in defined and has_cuda()


def _installed() -> str | None:
    """The machine's own compiler, if it works and is new enough."""
    homes = [*filter(None, map(os.environ.get, HOMES)), DEFAULT_HOME]
    folders = [os.environ.get("PATH", os.defpath), *(f"{home}/bin" for home in homes)]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    return nvcc if nvcc is not None and _works(nvcc) else None


def _works(nvcc: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="flexkv-nvcc-") as folder:
        source = Path(folder, "trial.cu")
        source.write_text(_TRIAL, encoding="utf-8")
        command = [nvcc, "-allow-unsupported-compiler", "-ptx", "-o", "trial.ptx", str(source)]
        if cxx := os.environ.get("CXX", "").split():
            command += ["-ccbin", cxx[0]]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0


def _fetched() -> str | None:
    """The compiler that was installed for this build."""
    package = importlib.util.find_spec("nvidia")
    for folder in [] if package is None else package.submodule_search_locations or []:
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc")):
            return str(nvcc)
    return None
