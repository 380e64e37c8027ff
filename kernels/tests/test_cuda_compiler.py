# SPDX-License-Identifier: Apache-2.0
"""A build takes the machine's nvcc, or fetches one, or leaves CUDA out: as the user says."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import cuda_compiler
import pytest
from cuda_compiler import COMPILER, NoCompilerError, definitions, required

KERNELS = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not cuda_compiler.has_cuda(), reason="a machine without CUDA")


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without one; the folder is all of its PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in cuda_compiler.HOMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda_compiler, "DEFAULT_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "path", [])
    return tmp_path


def put_nvcc(folder: Path, status: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\nexit {status}\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def test_a_machine_without_nvcc_fetches_all_of_one_toolkit(no_nvcc: Path) -> None:
    assert required({}) == required({"FLEXKV_CUDA": "ON"}) == COMPILER
    assert {requirement.partition("==")[2] for requirement in COMPILER} == {"13.0.*"}


def test_a_fetched_nvcc_is_used(no_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = put_nvcc(no_nvcc / "site" / "nvidia" / "cu13" / "bin", 0)
    monkeypatch.setattr(sys, "path", [str(no_nvcc / "site")])
    assert definitions({}) == {"FLEXKV_CUDA": "ON", "FKV_NVCC": nvcc}


def test_without_any_the_build_says_what_it_needs(no_nvcc: Path) -> None:
    with pytest.raises(NoCompilerError, match=r"nvidia-cuda-nvcc==13.0.\* .*FLEXKV_CUDA=OFF"):
        definitions({})


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME"])
def test_an_nvcc_that_works_is_used(
    no_nvcc: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    home = no_nvcc / "cuda"
    nvcc = put_nvcc(home / "bin", 0)
    monkeypatch.setenv(where, str(home / "bin" if where == "PATH" else home))
    assert required({}) == []
    assert definitions({}) == {"FLEXKV_CUDA": "ON", "FKV_NVCC": nvcc}


def test_an_nvcc_that_is_too_old_or_broken_is_not_used(no_nvcc: Path) -> None:
    put_nvcc(no_nvcc, 1)
    assert required({}) == COMPILER


@pytest.mark.parametrize(
    "defined", [{"FLEXKV_CUDA": "OFF"}, {"FLEXKV_CUDA": "AUTO"}, {"FKV_NVCC": "/opt/nvcc"}]
)
def test_what_the_user_has_decided_stays(no_nvcc: Path, defined: dict[str, str]) -> None:
    assert required(defined) == []
    assert definitions(defined) == {}


@pytest.mark.parametrize("other", ["darwin", "riscv64", "musl"])
def test_machines_that_have_no_cuda_build_without(
    no_nvcc: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    if other == "darwin":
        monkeypatch.setattr(sys, "platform", other)
    elif other == "musl":
        monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    else:
        monkeypatch.setattr(platform, "machine", lambda: other)
    assert required({}) == []
    assert definitions({}) == {"FLEXKV_CUDA": "OFF"}


@pytest.mark.parametrize(
    ("settings", "environment"),
    [({"cmake.define.FLEXKV_CUDA": "OFF"}, None), ({}, "FLEXKV_CUDA=OFF")],
)
def test_cuda_can_be_left_out_by_setting_and_by_environment(
    no_nvcc: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str | list[str]],
    environment: str | None,
) -> None:
    monkeypatch.undo()
    pytest.importorskip("scikit_build_core")
    import flexkv_kernels_build as backend

    monkeypatch.chdir(KERNELS)
    monkeypatch.setenv("PATH", str(no_nvcc))
    monkeypatch.setattr(cuda_compiler, "DEFAULT_HOME", str(no_nvcc))
    fetched = set(COMPILER)
    assert fetched <= set(backend.get_requires_for_build_wheel({}))
    assert fetched <= set(backend.get_requires_for_build_editable({}))
    if environment is not None:
        monkeypatch.setenv("SKBUILD_CMAKE_DEFINE", environment)
    assert fetched.isdisjoint(backend.get_requires_for_build_wheel(settings))
    assert fetched.isdisjoint(backend.get_requires_for_build_editable(settings))
