# SPDX-License-Identifier: Apache-2.0
"""What counts as the same model and the same adapter."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import LoRAConfig, MultiModalConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from world_config import PLUGIN, make_config

from flexkv_vllm import identity, keys
from packages.inside_adapters import forget_stamps


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
    forget_stamps()
    yield
    forget_stamps()


@pytest.fixture
def adapter(tmp_path: Path) -> LoRARequest:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"low rank")
    return LoRARequest("name", 1, str(folder))


def test_the_same_files_are_the_same_model(config: VllmConfig) -> None:
    assert identity.model_identity(config) == identity.model_identity(config)


def test_the_name_of_a_model_is_the_first_that_it_is_served_by(config: VllmConfig) -> None:
    model = config.model_config
    for names, first in ((["chat", "other"], "chat"), ("chat", "chat"), (None, model.model)):
        model.served_model_name = names
        assert identity.served_model(config) == first


@pytest.mark.parametrize("place", ["relative", "link", "copy", "download", "format"])
def test_where_a_model_lies_and_since_when_does_not_count(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    before = identity.model_identity(config)
    model = tmp_path / "model"
    match place:
        case "relative":
            monkeypatch.chdir(tmp_path)
            config.model_config.model = "./model"
        case "link":
            (tmp_path / "link").symlink_to(model)
            config.model_config.model = str(tmp_path / "link")
        case "copy":
            shutil.copytree(model, tmp_path / "copy")
            config.model_config.model = str(tmp_path / "copy")
        case "download":
            os.utime(model / "model.safetensors", ns=(1, 1))
        case "format":
            object.__setattr__(config.load_config, "load_format", "safetensors")
    assert identity.model_identity(config) == before


def test_a_model_of_the_hugging_face_cache_is_the_same_in_any_cache(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, in another HF_HOME, and by its path, as vLLM names it with HF_HUB_OFFLINE=1."""
    names = []
    for home in ("one", "other"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / home))
        repository = tmp_path / home / "models--org--name"
        snapshot = repository / "snapshots" / "c0ffee"
        for folder in (repository / "blobs", repository / "refs", snapshot):
            folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text("c0ffee")
        (snapshot / "config.json").write_text("{}")
        (repository / "blobs" / ("a" * 64)).write_bytes(b"weights")
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{'a' * 64}")
        for name, revision in (("org/name", None), ("org/name", "main"), (str(snapshot), None)):
            config.model_config.model, config.model_config.revision = name, revision
            assert identity.outlives_process(config)
            names.append(tuple(identity.model_identity(config)))
    assert len(set(names)) == 1


def test_a_setting_that_changes_the_model_is_another_model(config: VllmConfig) -> None:
    before = identity.model_identity(config)
    config.model_config.hf_config.rope_theta = 123.0
    assert identity.model_identity(config) != before


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("attention_config", "backend", "ANOTHER"),
        ("attention_config", "backend_per_kind", {"sliding_window": "ANOTHER"}),
        ("attention_config", "use_non_causal", True),
        ("model_config", "model", "/another/path"),
        ("model_config", "dtype", "another"),
        ("model_config", "quantization", "another"),
        ("model_config", "quantization_config", {"ignore": ["lm_head"]}),
        ("model_config", "model_class_overrides", {"LlamaForCausalLM": "module:Class"}),
        ("model_config", "model_impl", "transformers"),
        ("model_config", "disable_sliding_window", True),
        ("attention_config", "use_trtllm_attention", False),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("kernel_config", "moe_backend", "marlin"),
        ("compilation_config", "mode", "another"),
        ("parallel_config", "worker_extension_cls", "module.Class"),
        ("load_config", "ignore_patterns", ["model-2*"]),
        ("model_config", "code_revision", "a-branch"),
        ("cache_config", "cache_dtype", "another"),
        ("cache_config", "block_size", 7),
        ("cache_config", "prefix_caching_hash_algo", "another"),
        ("cache_config", "mamba_cache_dtype", "float16"),
        ("cache_config", "mamba_ssm_cache_dtype", "float16"),
        ("load_config", "load_format", "another"),
        ("load_config", "model_loader_extra_config", {"tensorizer_uri": "s3://bucket/model"}),
    ],
)
def test_each_part_of_the_configuration_makes_another_model(
    config: VllmConfig, part: str, name: str, value: object
) -> None:
    before = identity.model_identity(config)
    # vLLM's classes would check the value.
    object.__setattr__(getattr(config, part), name, value)
    assert identity.model_identity(config) != before


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model_config", "served_model_name", "chat"),
        ("model_config", "seed", 7),
        ("model_config", "enforce_eager", False),
        ("cache_config", "gpu_memory_utilization", 0.5),
        ("cache_config", "num_gpu_blocks", 7),
        ("cache_config", "kv_cache_memory_bytes", 7),
        ("parallel_config", "tensor_parallel_size", 2),
        ("parallel_config", "data_parallel_rank", 1),
        ("parallel_config", "master_port", 7),
        ("parallel_config", "_api_process_rank", 1),
        ("parallel_config", "world_size", 2),
        ("scheduler_config", "max_num_seqs", 7),
        ("compilation_config", "cudagraph_capture_sizes", [1, 2]),
        ("compilation_config", "static_forward_context", {"layer": object()}),
        ("load_config", "download_dir", "/elsewhere"),
        ("kv_transfer_config", "engine_id", "another"),
        ("observability_config", "otlp_traces_endpoint", "http://host"),
    ],
)
def test_settings_that_change_no_byte_do_not_count(
    config: VllmConfig, part: str, name: str, value: object
) -> None:
    before = identity.model_identity(config)
    object.__setattr__(getattr(config, part), name, value)
    assert identity.model_identity(config) == before


def test_a_configuration_of_a_later_release_counts(config: VllmConfig) -> None:
    @dataclass
    class NewConfig:
        field: str = "a"

    parts = []
    for value in ("a", "a", "b"):
        object.__setattr__(config, "attention_config", NewConfig(value))
        parts.append(identity.model_identity(config))
    assert parts[0] == parts[1] != parts[2]


def test_variables_of_vllm_count_unless_they_change_no_byte(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_DISABLED_KERNELS", raising=False)
    before = identity.model_identity(config)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.7:8000")
    # Kubernetes sets such variables for a service of the name vllm.
    monkeypatch.setenv("VLLM_SERVICE_HOST", "10.0.0.7")
    assert identity.model_identity(config) == before
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CutlassFP8")
    assert identity.model_identity(config) != before


class Adapted:
    """A value with no text of its own."""


class Hashed:
    def compute_hash(self) -> str:
        return "hash"


@pytest.mark.parametrize(
    ("value", "again", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3}),
        ({"of": {"x", "y"}}, {"of": {"y", "x"}}, {"of": {"x"}}),
        ({"of": Adapted()}, {"of": Adapted()}, {"of": Hashed()}),
        (Hashed(), Hashed(), Adapted()),
        ({"of": "seen at 0x7f"}, {"of": "seen at 0x7f"}, {"of": "seen at 0x8f"}),
    ],
)
def test_a_value_has_one_text_in_all_processes(
    config: VllmConfig, value: object, again: object, other: object
) -> None:
    parts = []
    for each in (value, again, other):
        object.__setattr__(config, "additional_config", each)
        parts.append(identity.model_identity(config))
    assert parts[0] == parts[1] != parts[2]
    assert "object at 0x" not in str(parts)


def test_a_file_that_a_setting_names_counts_by_what_it_contains(
    config: VllmConfig, tmp_path: Path
) -> None:
    parts = []
    for folder, text in (("one", "scales"), ("two", "scales"), ("three", "other scales")):
        file = tmp_path / folder
        file.write_text(text)
        object.__setattr__(config.load_config, "model_loader_extra_config", {"a_path": str(file)})
        parts.append(identity.model_identity(config))
    assert parts[0] == parts[1] != parts[2]


def draft_of(config: VllmConfig, model: Path, method: str = "eagle3") -> SpeculativeConfig:
    """A draft model in the place of vLLM's configuration of speculative decoding."""
    drafting = copy.copy(config.model_config)
    object.__setattr__(drafting, "model", str(model))
    made = SpeculativeConfig.__new__(SpeculativeConfig)
    for field in dataclasses.fields(SpeculativeConfig):
        object.__setattr__(made, field.name, None)
    for name, value in (("method", method), ("draft_model_config", drafting)):
        object.__setattr__(made, name, value)
    object.__setattr__(config, "speculative_config", made)
    return made


def test_a_draft_counts_with_its_weights_and_settings(config: VllmConfig, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "model", tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    alone = identity.model_identity(config)
    draft = draft_of(config, tmp_path / "draft")
    parts = [identity.model_identity(config)]
    object.__setattr__(draft, "num_speculative_tokens", 7)
    parts.append(identity.model_identity(config))
    weights.write_bytes(b"trained again")
    parts.append(identity.model_identity(config))
    object.__setattr__(draft, "kv_cache_dtype", "fp8")
    parts.append(identity.model_identity(config))
    assert alone != parts[0] == parts[1]
    assert len({tuple(each) for each in parts}) == 3
    assert identity.outlives_process(config)
    weights.unlink()
    assert not identity.outlives_process(config)
    draft_of(config, tmp_path / "draft", "ngram")
    assert identity.model_identity(config) == alone
    assert identity.outlives_process(config)


@pytest.mark.parametrize("kind", ["longrope", "yarn"])
def test_the_longest_context_counts_where_it_chooses_the_factors(
    config: VllmConfig, kind: str
) -> None:
    """vLLM's LongRoPE has two sets of factors, and takes one for all positions."""
    config.model_config.hf_config.rope_parameters = {"rope_type": kind, "factor": 4.0}
    before = identity.model_identity(config)
    object.__setattr__(config.model_config, "max_model_len", 100)
    assert (identity.model_identity(config) != before) == (kind == "longrope")


def see(config: VllmConfig, **settings: Any) -> None:
    """Let the model of `config` see, with these settings of vLLM's."""
    config.model_config.multimodal_config = MultiModalConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
        {"video_pruning_rate": 0.5},
    ],
)
def test_what_is_seen_of_an_image_counts(config: VllmConfig, settings: dict[str, Any]) -> None:
    names = []
    for given in ({}, {"mm_processor_cache_gb": 1}, settings):
        see(config, **given)
        names.append(identity.model_identity(config))
    assert names[0] == names[1] != names[2]


def test_the_files_of_a_processor_count_where_the_model_sees(
    config: VllmConfig, tmp_path: Path
) -> None:
    file = tmp_path / "model" / "preprocessor_config.json"
    text, seeing = [], []
    for size in (224, 224, 448):
        file.write_text(f'{{"size": {size}}}')
        config.model_config.multimodal_config = None
        text.append(identity.model_identity(config))
        see(config)
        seeing.append(identity.model_identity(config))
    assert text[0] == text[1] == text[2]
    assert seeing[0] == seeing[1] != seeing[2]


def test_another_tokenizer_is_another_model(config: VllmConfig, tmp_path: Path) -> None:
    """Some models look up embeddings by tokens that the tokenizer has normalized."""
    parts = []
    for folder, text in (("one", "{}"), ("two", "{}"), ("three", '{"normalizer": null}')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(text)
        config.model_config.tokenizer = str(tmp_path / folder)
        parts.append(identity.model_identity(config))
    assert parts[0] == parts[1] != parts[2]


CACHES = pytest.mark.parametrize(("own_gb", "processor_gb"), [(0, 0), (1, 0), (0, 1)])
"""vLLM's prefix cache and its cache of processed images; neither or one of them."""


@CACHES
def test_blocks_of_images_that_vllm_numbers_are_not_kept(
    config: VllmConfig, caplog: pytest.LogCaptureFixture, own_gb: int, processor_gb: int
) -> None:
    see(config, mm_processor_cache_gb=processor_gb)
    config.cache_config.enable_prefix_caching = bool(own_gb)
    numbered = not own_gb and not processor_gb
    with caplog.at_level(logging.WARNING, "flexkv.vllm"):
        assert identity.outlives_process(config) is not numbered
    assert ("numbers images" in caplog.text) == numbered
    config.model_config.multimodal_config = None
    assert identity.outlives_process(config)


@CACHES
def test_vllm_numbers_images_without_both_caches(
    config: VllmConfig, own_gb: int, processor_gb: int
) -> None:
    renderers = pytest.importorskip("vllm.renderers.base")
    name_items = getattr(renderers.BaseRenderer, "_process_mm_uuids", None)
    if name_items is None or "mm_req_id" not in inspect.signature(name_items).parameters:
        pytest.skip("this vLLM names images elsewhere")
    see(config, mm_processor_cache_gb=processor_gb)
    config.cache_config.enable_prefix_caching = bool(own_gb)
    renderer = SimpleNamespace(
        model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None
    )
    images = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    names = name_items(renderer, {}, images, {}, "renderer0-mm-1")
    numbered = not own_gb and not processor_gb
    assert names == ({"image": ["renderer0-mm-1-image-0"]} if numbered else {})


def test_another_vllm_is_another_model(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity.model_identity(config)
    monkeypatch.setattr(vllm, "__version__", "99.0")
    assert identity.model_identity(config) != before


def test_weights_of_other_contents_are_others(config: VllmConfig, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    names = []
    for content in (b"w", b"ww", b"v"):
        weights.write_bytes(content)
        names.append(tuple(identity.model_identity(config)))
    assert len(set(names)) == 3


def test_nodes_of_different_hash_seeds_are_different(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of their keys is equal. Without the variable, newer releases have one seed."""
    names = []
    for seed in ("0", "0", "1234", "vllm-none-hash", None):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        names.append(identity.model_identity(config))
    zero, again, other, default, unset = names
    assert zero == again
    assert zero != other
    assert zero != unset != other
    fixed = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    assert (unset == default) == fixed


def test_each_part_of_the_fingerprint_has_a_name(config: VllmConfig) -> None:
    see(config)
    parts = identity.model_identity(config)
    names = [part.partition(": ")[0] for part in parts]
    assert all(": " in part for part in parts)
    assert len(set(names)) == len(names)


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
    stamps = {keys.adapter_stamp(each) for each in (adapter, *others)}
    assert len(stamps) == 3


def test_weights_that_are_not_here_are_not_kept(
    config: VllmConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert identity.outlives_process(config)
    (tmp_path / "model" / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "flexkv.vllm"):
        assert not identity.outlives_process(config)
    assert "no blocks are kept on disk" in caplog.text


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("load_config", "load_format", "tensorizer"),
        ("load_config", "load_format", "modelexpress"),
        ("load_config", "load_format", "ipc_cache"),
        ("load_config", "load_format", "one of a later release"),
        ("model_config", "model_weights", "s3://bucket/model"),
    ],
)
def test_weights_that_no_file_names_are_not_kept_outside_the_process(
    config: VllmConfig, caplog: pytest.LogCaptureFixture, part: str, name: str, value: str
) -> None:
    object.__setattr__(getattr(config, part), name, value)
    with caplog.at_level(logging.WARNING, "flexkv.vllm"):
        assert not identity.outlives_process(config)
    assert "no blocks are kept on disk or shared" in caplog.text
    object.__setattr__(config.load_config, "load_format", "dummy")
    assert identity.outlives_process(config) is (name != "model_weights")


def test_an_adapter_is_its_files(adapter: LoRARequest) -> None:
    first = keys.adapter_stamp(adapter)
    forget_stamps()
    assert keys.adapter_stamp(adapter) == first
    forget_stamps()
    Path(adapter.lora_path, "adapter_model.safetensors").write_bytes(b"other low rank")
    assert keys.adapter_stamp(adapter) != first


def test_an_adapter_of_another_scale_is_another_one(adapter: LoRARequest) -> None:
    settings = Path(adapter.lora_path, "adapter_config.json")
    stamps = []
    for alpha in (16, 16, 32):
        settings.write_text(f'{{"r": 8, "lora_alpha": {alpha}}}')
        forget_stamps()
        stamps.append(keys.adapter_stamp(adapter))
    assert stamps[0] == stamps[1] != stamps[2]


def test_how_adapters_are_applied_counts(config: VllmConfig) -> None:
    """vLLM may apply an adapter to some modules alone, or in another precision."""
    names = [tuple(identity.model_identity(config))]
    dtype = config.model_config.dtype
    for lora_dtype, modules in (
        (dtype, None),
        (torch.float16, None),
        (dtype, ["q_proj", "o_proj"]),
        (dtype, ["o_proj", "q_proj"]),
        (dtype, ["o_proj"]),
    ):
        lora = LoRAConfig(max_loras=len(names))
        object.__setattr__(lora, "lora_dtype", lora_dtype)
        object.__setattr__(lora, "target_modules", modules)
        object.__setattr__(config, "lora_config", lora)
        names.append(tuple(identity.model_identity(config)))
    object.__setattr__(lora, "enable_tower_connector_lora", True)
    tower = tuple(identity.model_identity(config))
    none, default, half, two, same_two, one = names
    assert none == default
    assert two == same_two
    assert len({default, half, two, one, tower}) == 5


def test_blocks_of_scales_that_a_process_computes_are_not_kept(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    object.__setattr__(config.cache_config, "calculate_kv_scales", True)
    with caplog.at_level(logging.WARNING, "flexkv.vllm"):
        assert not identity.outlives_process(config)
    assert "no blocks are kept on disk or shared" in caplog.text
    object.__setattr__(config.cache_config, "calculate_kv_scales", False)
    assert identity.outlives_process(config)


def test_an_adapter_that_is_not_here_is_another_one_in_every_process() -> None:
    elsewhere = LoRARequest("name", 1, "someone/something")
    first = keys.adapter_stamp(elsewhere)
    assert keys.adapter_stamp(elsewhere) == first
    forget_stamps()
    assert keys.adapter_stamp(elsewhere) != first


def test_random_hashes_are_told(
    config: VllmConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with caplog.at_level(logging.WARNING, "flexkv.vllm"):
        assert identity.outlives_process(config)
        assert not identity.shares_blocks(config)
    assert caplog.text.count("PYTHONHASHSEED") == 2
    caplog.clear()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert identity.outlives_process(config)
    assert identity.shares_blocks(config)
    assert "PYTHONHASHSEED" not in caplog.text
