# SPDX-License-Identifier: Apache-2.0
"""What counts as the same model and the same adapter."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
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


def test_another_model_whose_files_look_alike_is_another_model(
    config: VllmConfig, tmp_path: Path
) -> None:
    before = identity.model_identity(config)
    shutil.copytree(tmp_path / "model", tmp_path / "other")  # with their times
    config.model_config.model = str(tmp_path / "other")
    assert identity.model_identity(config) != before


def test_a_setting_that_changes_the_model_is_another_model(config: VllmConfig) -> None:
    before = identity.model_identity(config)
    config.model_config.hf_config.rope_theta = 123.0
    assert identity.model_identity(config) != before


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("attention_config", "backend", "ANOTHER"),
        ("model_config", "model", "/another/path"),
        ("model_config", "revision", "a-branch"),
        ("model_config", "dtype", "another"),
        ("model_config", "quantization", "another"),
        ("cache_config", "cache_dtype", "another"),
        ("cache_config", "block_size", 7),
        ("cache_config", "prefix_caching_hash_algo", "another"),
        ("load_config", "load_format", "another"),
    ],
)
def test_each_part_of_the_configuration_makes_another_model(
    config: VllmConfig, part: str, name: str, value: object
) -> None:
    before = identity.model_identity(config)
    # vLLM's classes would check the value.
    object.__setattr__(getattr(config, part), name, value)
    assert identity.model_identity(config) != before


def test_another_vllm_is_another_model(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity.model_identity(config)
    monkeypatch.setattr(vllm, "__version__", "99.0")
    assert identity.model_identity(config) != before


def test_weights_of_another_size_or_time_are_others(config: VllmConfig, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    names = []
    for size, time in ((1, 1), (2, 1), (1, 2)):
        weights.write_bytes(b"w" * size)
        os.utime(weights, ns=(time, time))
        names.append(tuple(identity.model_identity(config)))
    assert len(set(names)) == 3


def test_dummy_weights_are_those_of_their_seed(config: VllmConfig) -> None:
    object.__setattr__(config.load_config, "load_format", "dummy")
    before = identity.model_identity(config)
    object.__setattr__(config.model_config, "seed", 7)
    assert identity.model_identity(config) != before


def test_an_adapter_has_its_name_and_path(adapter: LoRARequest, tmp_path: Path) -> None:
    shutil.copytree(adapter.lora_path, tmp_path / "copy", copy_function=shutil.copy2)
    others = (
        LoRARequest("another name", 1, adapter.lora_path),
        LoRARequest("name", 1, str(tmp_path / "copy")),
    )
    stamps = {identity.adapter_stamp(each) for each in (adapter, *others)}
    assert len(stamps) == 3


def test_weights_that_are_not_here_are_not_kept(
    config: VllmConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert identity.outlives_process(config)
    (tmp_path / "model" / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "flexkv.vllm"):
        assert not identity.outlives_process(config)
    assert "no blocks are kept on disk" in caplog.text


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
