# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_world import make_model, make_settings

from flexkv_sglang.identity import model_identity, outlives_process, served_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def identity(model: Path, version: str = "0.5.23", **settings: Any) -> list[str]:
    return model_identity(make_settings(model, **settings), make_model(), version)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat16"),
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("page_size", 16),
        ("attention_backend", "triton"),
        ("quantization_param_path", "scales.json"),
        ("forward_hooks", [{"name": "steer", "hook_factory": "module:make"}]),
        ("modelopt_quant", "nvfp4"),
        ("kt_method", "AMXINT4"),
        ("weight_cache_mode", "client"),
        ("model_loader_extra_config", '{"x": 1}'),
        ("rl_quant_profile", "/profile"),
        ("decode_attention_backend", "triton"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("tokenizer_mode", "slow"),
        ("cuda_graph_tc_compiler", "inductor"),
        ("an_argument_of_a_later_release", False),
    ],
)
def test_each_setting_that_decides_the_bytes_counts(model: Path, name: str, value: Any) -> None:
    assert identity(model, **{name: value}) != identity(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", "secret"),
        ("watermark_key", "secret"),
        ("port", 30001),
        ("tp_size", 2),
        ("mem_fraction_static", 0.5),
        ("random_seed", 7),
        ("served_model_name", "chat"),
        ("speculative_algorithm", "NGRAM"),
        ("an_argument_of_a_later_release", None),
    ],
)
def test_settings_that_change_no_byte_do_not_count(model: Path, name: str, value: Any) -> None:
    assert identity(model, **{name: value}) == identity(model)


def test_settings_are_found_whatever_holds_them(model: Path) -> None:
    """SGLang's settings are a dataclass or a struct, of which a view passes attributes on."""

    class View:
        __slots__ = ("_settings",)

        def __init__(self, settings: Any) -> None:
            self._settings = settings

        def __getattr__(self, name: str) -> Any:
            return getattr(self._settings, name)

    plain = make_settings(model)
    for fields in ("__struct_fields__", "__dataclass_fields__"):
        settings = make_settings(model)
        setattr(settings, fields, tuple(vars(plain)))
        assert model_identity(View(settings), make_model(), "0.5.23") == identity(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "preprocessor_config.json"])
@pytest.mark.parametrize("beside", [True, False], ids=["model", "tokenizer_path"])
def test_the_files_of_a_tokenizer_and_a_processor_count(
    model: Path, tmp_path: Path, name: str, *, beside: bool
) -> None:
    """Callers may name images by hashes of their own, and tokens may choose embeddings by what the
    tokenizer makes of them."""
    parts = []
    for number, text in enumerate(("{}", "{}", '{"size": 448}')):
        folder = model if beside else tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        parts.append(identity(model, tokenizer_path=None if beside else str(folder)))
    assert parts[0] == parts[1] != parts[2]


def test_variables_of_sglang_count_unless_they_change_no_byte(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang.srt.environ")
    monkeypatch.delenv("SGLANG_FP8_IGNORED_LAYERS", raising=False)
    before = identity(model)
    for name, value in (
        ("SGLANG_LOG_MS", "1"),
        ("SGLANG_PORT", "tcp://10.0.0.7:30000"),
        # Kubernetes sets such variables for a service of the name sglang.
        ("SGLANG_SERVICE_HOST", "10.0.0.7"),
    ):
        monkeypatch.setenv(name, value)
    assert identity(model) == before
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", "lm_head")
    assert identity(model) != before


def test_a_file_that_a_setting_names_counts_by_what_it_contains(
    model: Path, tmp_path: Path
) -> None:
    parts = []
    for name, text in (("one", "a: 1"), ("two", "a: 1"), ("three", "a: 2")):
        (tmp_path / name).write_text(text)
        parts.append(identity(model, dllm_algorithm_config=str(tmp_path / name)))
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize(
    "settings",
    [
        {"load_format": "remote_instance"},
        {"load_format": "one of a later release"},
        {"forward_hooks": [{"name": "steer"}]},
        {"kt_weight_path": "/int4"},
        {"weight_cache_mode": "client"},
        {"custom_weight_loader": ["module.load"]},
        {"uno_lora_path": "/lora"},
    ],
)
def test_weights_that_no_file_names_are_not_kept_outside_the_process(
    model: Path, settings: dict[str, Any]
) -> None:
    assert not outlives_process(make_settings(model, **settings))
    assert outlives_process(make_settings(model, weight_cache_mode="off", forward_hooks=None))


def test_the_name_of_a_model_is_that_which_it_is_served_by(model: Path) -> None:
    assert served_model(make_settings(model, served_model_name="chat")) == "chat"
    assert served_model(make_settings(model, served_model_name=None)) == str(model)


def test_another_version_has_other_pages(model: Path) -> None:
    assert identity(model, version="0.5.24") != identity(model)


def test_other_weights_are_another_model(model: Path) -> None:
    before = identity(model)
    (model / "model.safetensors").write_bytes(b"other weights")
    assert identity(model) != before


def with_draft(model: Path, draft: Path, **settings: Any) -> list[str]:
    settings = {"speculative_draft_model_path": str(draft), "speculative_algorithm": "EAGLE"} | (
        settings
    )
    return model_identity(make_settings(model, **settings), make_model(), "0.5.23", make_model())


def test_a_draft_counts_with_its_weights_and_settings(model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"draft")
    alone, before = identity(model), with_draft(model, draft)
    assert before != alone
    assert set(alone) <= set(before)
    shutil.copytree(draft, tmp_path / "copy")
    assert with_draft(model, tmp_path / "copy") == before
    others = [
        with_draft(model, draft, speculative_algorithm="EAGLE3"),
        with_draft(model, draft, speculative_draft_kv_cache_dtype="fp8_e5m2"),
        with_draft(model, draft, speculative_draft_load_format="dummy"),
        with_draft(model, draft, speculative_draft_load_format="dummy", random_seed=1),
    ]
    (draft / "model.safetensors").write_bytes(b"other draft")
    others.append(with_draft(model, draft))
    assert len({tuple(each) for each in [before, *others]}) == 1 + len(others)


def test_a_draft_without_weights_on_this_machine_does_not_outlive_the_process(
    model: Path, tmp_path: Path
) -> None:
    settings = make_settings(model, speculative_draft_model_path=str(tmp_path / "none"))
    assert outlives_process(settings)
    assert not outlives_process(settings, make_model())


def test_where_a_model_and_its_adapters_lie_does_not_count(model: Path, tmp_path: Path) -> None:
    (model / "adapter").mkdir()
    (model / "adapter" / "adapter.safetensors").write_bytes(b"1")
    before = identity(model, lora_paths=adapter(model / "adapter"))
    copy = tmp_path / "copy"
    shutil.copytree(model, copy, copy_function=shutil.copy)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    os.utime(copy / "adapter" / "adapter.safetensors", ns=(1, 1))
    assert identity(copy, lora_paths=adapter(copy / "adapter")) == before
    assert identity(copy, lora_paths=adapter(copy / "adapter"), load_format="safetensors") == before


def test_scales_are_the_contents_of_their_file(model: Path) -> None:
    names = []
    for name, content in (("a.json", "1"), ("b.json", "1"), ("b.json", "2")):
        (model / name).write_text(content)
        names.append(identity(model, quantization_param_path=str(model / name)))
    assert names[0] == names[1] != names[2]


def test_dummy_weights_are_those_of_their_seed(model: Path) -> None:
    dummy = {"load_format": "dummy"}
    assert identity(model, **dummy, random_seed=1) != identity(model, **dummy, random_seed=2)
    assert identity(model, random_seed=1) == identity(model, random_seed=2)


def adapter(path: Path) -> Any:
    return [SimpleNamespace(lora_name="a", lora_path=str(path))]


def test_an_adapter_trained_anew_is_another_one(model: Path) -> None:
    weights = model / "adapter" / "adapter.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"1")
    before = identity(model, lora_paths=adapter(weights.parent))
    assert before == identity(model, lora_paths=adapter(weights.parent))
    weights.write_bytes(b"12")
    assert identity(model, lora_paths=adapter(weights.parent)) != before


def test_an_adapter_of_another_scale_is_another_one(model: Path) -> None:
    folder = model / "adapter"
    folder.mkdir()
    (folder / "adapter.safetensors").write_bytes(b"1")
    names = []
    for alpha in (16, 16, 32):
        (folder / "adapter_config.json").write_text(f'{{"r": 8, "lora_alpha": {alpha}}}')
        names.append(identity(model, lora_paths=adapter(folder)))
    assert names[0] == names[1] != names[2]


def test_an_adapter_that_is_not_here_is_never_the_same(model: Path) -> None:
    elsewhere = adapter(model / "elsewhere")
    assert identity(model, lora_paths=elsewhere) != identity(model, lora_paths=elsewhere)


def test_a_model_without_weights_here_is_not_kept_on_disk(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert outlives_process(make_settings(model))
    assert not outlives_process(make_settings(model / "nothing"))
    assert "cannot tell when they change" in caplog.text
