# SPDX-License-Identifier: Apache-2.0
"""What counts as the same model and the same adapter."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from world_config import PLUGIN, make_config

from flexkv_vllm import identity


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return make_config(
        tmp_path,
        1 << 20,
        ranks=1,
        entry=PLUGIN,
        block_tokens=16,
        budget=128,
        policy="fail",
        max_requests=8,
    )


@pytest.fixture(autouse=True)
def fresh_stamps() -> Iterator[None]:
    identity._stamp.cache_clear()
    yield
    identity._stamp.cache_clear()


@pytest.fixture
def adapter(tmp_path: Path) -> LoRARequest:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"low rank")
    return LoRARequest("name", 1, str(folder))


def test_the_same_files_are_the_same_model(config: VllmConfig) -> None:
    assert identity.model_identity(config) == identity.model_identity(config)


def test_files_of_another_time_are_another_model(config: VllmConfig, tmp_path: Path) -> None:
    before = identity.model_identity(config)
    os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    assert identity.model_identity(config) != before


def test_a_setting_that_changes_the_model_is_another_model(config: VllmConfig) -> None:
    before = identity.model_identity(config)
    config.model_config.hf_config.rope_theta = 123.0
    assert identity.model_identity(config) != before


def test_weights_that_are_not_here_are_not_kept(
    config: VllmConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert identity.outlives_process(config)
    (tmp_path / "model" / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "flexkv.vllm"):
        assert not identity.outlives_process(config)
    assert "no block is kept on disk" in caplog.text


def test_an_adapter_is_its_files(adapter: LoRARequest) -> None:
    first = identity.adapter_stamp(adapter)
    identity._stamp.cache_clear()
    assert identity.adapter_stamp(adapter) == first
    identity._stamp.cache_clear()
    Path(adapter.lora_path, "adapter_model.safetensors").write_bytes(b"other low rank")
    assert identity.adapter_stamp(adapter) != first


def test_an_adapter_that_is_not_here_is_another_one_in_every_process() -> None:
    elsewhere = LoRARequest("name", 1, "someone/something")
    first = identity.adapter_stamp(elsewhere)
    assert identity.adapter_stamp(elsewhere) == first
    identity._stamp.cache_clear()
    assert identity.adapter_stamp(elsewhere) != first


def test_random_hashes_are_told(
    config: VllmConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with caplog.at_level(logging.WARNING, "flexkv.vllm"):
        assert identity.outlives_process(config)
    assert "PYTHONHASHSEED" in caplog.text
    caplog.clear()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert identity.outlives_process(config)
    assert "PYTHONHASHSEED" not in caplog.text
