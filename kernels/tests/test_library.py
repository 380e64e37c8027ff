# SPDX-License-Identifier: Apache-2.0
"""A library or a compiler that is missing or wrong gives one clear error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import flexkv_kernels
from flexkv_kernels import _library

KERNELS = Path(__file__).resolve().parents[1]


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=rf"not built: libflexkv_kernels\.\w+ .*{tmp_path}"):
        _library.find([str(tmp_path)])


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / _library.library_name()
    path.write_bytes(b"not a shared object")
    with pytest.raises(ImportError, match=f"{path} is not a usable library of flexkv-kernels"):
        _library.load(path)


def test_another_abi_version_is_refused() -> None:
    path = _library.find(list(flexkv_kernels.__path__))
    ours, other = _library.ABI_VERSION, _library.ABI_VERSION + 1
    with pytest.raises(ImportError, match=f"has ABI version {ours}, this Python .* needs {other}"):
        _library.load(path, abi_version=other)


def configure(build: Path, env: dict[str, str], *args: str) -> str:
    """What CMake prints when it refuses to configure the sources."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake on the PATH")
    run = subprocess.run(
        [cmake, "-S", str(KERNELS), "-B", str(build), *args],
        check=False,
        env={key: value for key, value in os.environ.items() if key != "CXX"} | env,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    return re.sub(r"\s+", " ", run.stdout + run.stderr)


def test_without_a_compiler_the_build_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    output = configure(
        tmp_path / "build",
        {"PATH": str(tmp_path / "empty")},
        "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF",  # /usr/bin and the like
        "-DCMAKE_MAKE_PROGRAM=unused",
    )
    assert "No C++ compiler found. Looked for: c++, g++ and clang++ on the PATH" in output
    assert "GCC >= 11 or Clang >= 14" in output
    assert "apt-get install g++" in output


def test_a_compiler_that_does_not_exist_is_named(tmp_path: Path) -> None:
    output = configure(tmp_path / "build", {"CXX": "no-such-compiler -O2"})
    assert "Looked for: CXX=no-such-compiler -O2" in output
    assert "GCC >= 11 or Clang >= 14" in output


def test_a_missing_nvcc_is_an_error_where_cuda_was_asked_for(tmp_path: Path) -> None:
    output = configure(tmp_path / "build", {}, "-DFLEXKV_CUDA=ON", "-DFKV_NVCC=/nowhere/nvcc")
    assert "FLEXKV_CUDA is ON, but /nowhere/nvcc --version names no release" in output
