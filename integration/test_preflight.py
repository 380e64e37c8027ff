# SPDX-License-Identifier: Apache-2.0
"""What is checked before anything long starts, with the compilers that are here and fake ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from integration import preflight


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_headers_that_are_missing_are_named(tmp_path: Path) -> None:
    preflight.check_headers()
    with pytest.raises(preflight.PreflightError) as caught:
        preflight.check_headers(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "apt-get install python3-dev" in str(caught.value)


def test_finds_a_compiler_that_works() -> None:
    command = preflight.find_cxx()
    assert shutil.which(command.split()[0])


def test_cxx_is_the_only_candidate(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-compiler")
    with pytest.raises(preflight.PreflightError) as caught:
        preflight.find_cxx({**os.environ, "CXX": missing})
    message = str(caught.value)
    assert f"{missing} (from $CXX): not found" in message
    assert "clang++:" not in message


def test_names_every_command_it_looked_for_and_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(preflight.PreflightError) as caught:
        preflight.find_cxx({"PATH": str(tmp_path)})
    message = str(caught.value)
    for name in preflight.COMPILER_NAMES:
        assert f"{name}: not found" in message
    assert "GCC 11" in message
    assert "apt-get install g++" in message


def test_an_old_compiler_is_turned_down_with_its_own_words(tmp_path: Path) -> None:
    real = preflight.find_cxx()
    old = script(tmp_path, "old-c++", f'exec {real} "$@" -std=c++11')
    with pytest.raises(preflight.PreflightError) as caught:
        preflight.find_cxx({**os.environ, "CXX": str(old)})
    assert "cannot compile C++20:" in str(caught.value)
    assert "error" in str(caught.value)


def test_cxx_may_carry_arguments() -> None:
    with_argument = f"{preflight.find_cxx()} -O1"
    assert preflight.find_cxx({**os.environ, "CXX": with_argument}) == with_argument


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-0)'", True),
        ("echo 'No devices were found'; exit 6", False),
    ],
)
def test_a_gpu_is_what_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: bool
) -> None:
    script(tmp_path, "nvidia-smi", body)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.has_nvidia_gpu() is expected


def test_no_gpu_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.has_nvidia_gpu() is False
