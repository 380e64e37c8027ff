# SPDX-License-Identifier: Apache-2.0
"""`--enable-flexkv` is taken over, with stand-ins for the few names of SGLang that it needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flexkv import CacheConfig, ConfigError, EngineVersionError, LayoutError
from flexkv_sglang import plugin
from flexkv_sglang.compat import check_version
from flexkv_sglang.settings import read_settings, report_ignored

UNSET: dict[str, Any] = {
    "flexkv_config_file": None,
    "enable_unified_cache_external_linker": False,
    "unified_cache_external_linker_backend": "mooncake",
    "unified_cache_external_linker_config": None,
    "speculative_algorithm": None,
    "model_impl": "auto",
    "model": SimpleNamespace(is_hybrid_swa=False, is_multimodal=False, ssm=False),
}
"""SGLang's settings if the command line has none."""

LINKED: dict[str, Any] = {
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": True,
    "unified_cache_external_linker_backend": "dynamic",
    "unified_cache_external_linker_config": {
        "linker": "FlexKVLinker",
        "linker_module_path": "flexkv_sglang.linker",
    },
}
"""SGLang's own flags that stand for FlexKV's."""


class Speculation:
    """SGLang's names of ways to guess tokens."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    @classmethod
    def from_string(cls, name: str | None) -> Speculation:
        return cls(name)

    def is_speculative(self) -> bool:
        return self._name is not None

    def has_draft_kv(self) -> bool:
        return self._name != "NGRAM"


class SGLang:
    """What the plugin registered and declared."""

    def __init__(self, patch: pytest.MonkeyPatch, version: str) -> None:
        self.declared: dict[str, Any] = {}
        self.steps: dict[str, Callable[..., None]] = {}
        self.hooks: dict[str, Callable[..., Any]] = {}
        modules = {
            "sglang": {"__version__": version},
            "sglang.srt.arg_groups.model_override_base": {
                "model_config_of": lambda arguments: arguments.model
            },
            "sglang.srt.mem_cache.kv_cache_builder": {"uses_ssm_state": lambda model: model.ssm},
            "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": Speculation},
            "sglang.srt.arg_groups.overrides": {
                "declare_resolution": lambda _, __, **chosen: self.declared.update(chosen),
                "resolving_view": lambda arguments: arguments,
            },
            "sglang.srt.plugins.hook_registry": {
                "HookType": SimpleNamespace(AROUND="around"),
                "HookRegistry": SimpleNamespace(
                    register=lambda target, hook, kind: self.hooks.update({target: hook})
                ),
            },
        }
        if version == "0.5.23":
            modules["sglang.srt.arg_groups.resolution_hooks"] = {
                "register_resolution_hook": lambda name: (
                    lambda step: self.steps.update({name: step})
                )
            }
        for name, names in modules.items():
            module = ModuleType(name)
            module.__dict__.update(names)
            patch.setitem(sys.modules, name, module)

    def start(self, **arguments: Any) -> dict[str, Any]:
        """Resolve SGLang's arguments; returns what was declared."""
        given = SimpleNamespace(**UNSET | {"enable_flexkv": True} | arguments)
        done: list[Any] = []
        for step in self.steps.values():
            step(given, done.append)
            vars(given).update(self.declared)
        assert done == [given, given]
        return self.declared


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SGLang:
    made = SGLang(monkeypatch, "0.5.23")
    plugin.register()
    return made


def test_the_flag_alone_starts_the_linker(sglang: SGLang) -> None:
    declared = sglang.start()
    assert declared["enable_flexkv"] is False
    assert declared["enable_unified_cache_external_linker"] is True
    assert declared["unified_cache_external_linker_backend"] == "dynamic"
    assert declared["unified_cache_external_linker_config"] == {
        "linker": "FlexKVLinker",
        "linker_module_path": "flexkv_sglang.linker",
        "linker_extra_config": {},
    }


def test_without_the_flag_nothing_changes(sglang: SGLang) -> None:
    assert sglang.start(enable_flexkv=False) == {}


def test_variables_without_the_flag_are_said_to_have_no_effect(
    sglang: SGLang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "3")
    for name in ("unified_cache_external_linker_config", "hicache_storage_backend_extra_config"):
        sglang.start(enable_flexkv=False, **{name: '{"module_path": "flexkv_sglang.x"}'})
    sglang.start()
    assert not caplog.records
    sglang.start(enable_flexkv=False)
    (line,) = caplog.messages
    assert line.startswith("FLEXKV_CPU_CACHE_GB: set, but without effect")


def test_lmcaches_variables_are_said_to_have_no_effect(
    sglang: SGLang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    sglang.start(enable_flexkv=False)
    assert not caplog.records
    sglang.start()
    (line,) = caplog.messages
    assert line.startswith("LMCACHE_CHUNK_SIZE: set, but without effect on FlexKV")


def test_settings_that_the_linker_ignores_are_said(caplog: pytest.LogCaptureFixture) -> None:
    report_ignored(CacheConfig(min_load_tokens=3))
    assert not caplog.records
    report_ignored(CacheConfig(block_tokens=32, load_mode="auto", pin_seconds=7))
    begins = [each.partition(":")[0] for each in caplog.messages]
    assert begins == ["block_tokens", "load_mode"]


def test_flexkv_that_is_turned_off_leaves_sglang_alone(
    sglang: SGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_FLEXKV", "0")
    assert sglang.start() == {"enable_flexkv": False}


def test_the_settings_file_of_the_flag_is_read(sglang: SGLang, tmp_path: Path) -> None:
    file = tmp_path / "flexkv.yaml"
    file.write_text("cpu_cache_gb: 3\n")
    made = sglang.start(flexkv_config_file=str(file))["unified_cache_external_linker_config"]
    assert read_settings(made["linker_extra_config"]).cpu_cache_gb == 3


def test_a_wrong_setting_stops_sglang_before_it_reads_weights(
    sglang: SGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "much")
    with pytest.raises(ConfigError, match="FLEXKV_CPU_CACHE_GB"):
        sglang.start()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("nnodes", 2, "SGLang's --nnodes is 2; allowed with FlexKV: 1"),
        ("attn_cp_size", 2, "--attn-cp-size (--attention-context-parallel-size) is 2"),
        ("dcp_size", 2, "--dcp-size (--decode-context-parallel-size) is 2"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache (--enable-hicache) is"),
        ("enable_lmcache", True, "--enable-lmcache is set"),
        ("disable_radix_cache", True, "off, by --disable-radix-cache or by SGLang's choice"),
        ("enable_hisparse", True, "--enable-hisparse is set"),
        ("enable_unified_memory", True, "--enable-unified-memory is set"),
        ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding is set"),
        ("enable_int8_mamba_checkpoint", True, "--enable-int8-mamba-checkpoint is set"),
        ("enable_linear_replayssm", True, "--enable-linear-replayssm is set"),
        ("enable_linear_replayssm_spec", True, "--enable-linear-replayssm-spec is set"),
        ("enable_return_routed_experts", True, "--enable-return-routed-experts is set"),
        ("enable_return_indexer_topk", True, "--enable-return-indexer-topk is set"),
        ("enable_pd_role_switch", True, "--enable-pd-role-switch is set; .* keep their role"),
        ("radix_cache_backend", "other", "--radix-cache-backend is 'other'"),
        ("hicache_storage_backend", "file", "--hicache-storage-backend is 'file'"),
        ("kv_cache_dtype", "nvfp4", "--kv-cache-dtype is nvfp4, which keeps scales"),
        ("dllm_algorithm", "LowConfidence", "--dllm-algorithm is 'LowConfidence'"),
        ("disaggregation_mode", "decode", "also --disaggregation-decode-enable-radix-cache"),
    ],
)
def test_what_cannot_be_cached_right_is_refused(
    sglang: SGLang, name: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.sub(r"([()])", r"\\\1", said)):
        sglang.start(**{name: value})


@pytest.mark.parametrize("linked", [False, True], ids=["flag", "own flags"])
def test_a_draft_that_cannot_be_cached_is_refused(sglang: SGLang, linked: bool) -> None:
    chosen = LINKED if linked else {}
    with pytest.raises(ConfigError, match=r"is DFLASH, whose .* STANDALONE$"):
        sglang.start(speculative_algorithm="DFLASH", **chosen)


@pytest.mark.parametrize("linked", [False, True], ids=["flag", "own flags"])
def test_stages_of_full_attention_are_cached(sglang: SGLang, linked: bool) -> None:
    chosen = (LINKED if linked else {}) | {"pp_size": 2}
    sglang.start(**chosen)
    said = r"--pp-size \(--pipeline-parallel-size\) is 2 "
    with pytest.raises(ConfigError, match=said + "with --speculative-algorithm EAGLE; allowed"):
        sglang.start(**chosen, speculative_algorithm="EAGLE")
    with pytest.raises(ConfigError, match=said + "with --disaggregation-mode prefill; .* 1, or"):
        sglang.start(**chosen, disaggregation_mode="prefill")
    for kind in ("is_hybrid_swa", "ssm"):
        model = SimpleNamespace(**vars(UNSET["model"]) | {kind: True})
        with pytest.raises(ConfigError, match=said + "and the model .* windows or recurrent"):
            sglang.start(**chosen, model=model)


@pytest.mark.parametrize("linked", [False, True], ids=["flag", "own flags"])
def test_windows_are_cached_unless_a_draft_or_compressed(sglang: SGLang, linked: bool) -> None:
    chosen = LINKED if linked else {}
    model = SimpleNamespace(**vars(UNSET["model"]) | {"is_hybrid_swa": True})
    sglang.start(model=model, **chosen)
    sglang.start(model=model, speculative_algorithm="NGRAM", **chosen)
    with pytest.raises(ConfigError, match=r"is EAGLE and the model .* has sliding windows"):
        sglang.start(model=model, speculative_algorithm="EAGLE", **chosen)
    model.is_hybrid_swa_compress = True
    with pytest.raises(LayoutError, match="of --model-path keeps windows of compressed states"):
        sglang.start(model=model, **chosen)


@pytest.mark.parametrize("linked", [False, True], ids=["flag", "own flags"])
def test_states_are_cached_unless_beside_a_draft(sglang: SGLang, linked: bool) -> None:
    chosen = LINKED if linked else {}
    model = SimpleNamespace(**vars(UNSET["model"]) | {"ssm": True})
    sglang.start(model=model, **chosen)
    sglang.start(model=model, speculative_algorithm="NGRAM", **chosen)
    with pytest.raises(ConfigError, match=r"is EAGLE and the model .* or recurrent states"):
        sglang.start(model=model, speculative_algorithm="EAGLE", **chosen)
    sglang.start(model=model, disaggregation_mode="prefill", **chosen)


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE", "EAGLE3", "STANDALONE"])
def test_drafts_in_the_targets_pages_start(sglang: SGLang, algorithm: str) -> None:
    assert sglang.start(speculative_algorithm=algorithm)


def test_multimodal_models_that_transformers_runs_are_refused(sglang: SGLang) -> None:
    model = SimpleNamespace(**vars(UNSET["model"]) | {"is_multimodal": True})
    assert sglang.start(model=model)
    with pytest.raises(ConfigError, match="--model-impl is transformers"):
        sglang.start(model=model, model_impl="transformers")


def test_what_sglang_resolves_for_the_model_is_refused(sglang: SGLang) -> None:
    first, last = sglang.steps.values()
    given = SimpleNamespace(**UNSET | LINKED)
    first(given, lambda _: None)

    def choose(settings: Any) -> None:
        settings.disable_radix_cache = True

    with pytest.raises(ConfigError, match="by SGLang's choice for this model"):
        last(given, choose)


def test_sglangs_own_flags_are_checked_as_the_flag_is(
    sglang: SGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sglang.start(**LINKED) == {}
    with pytest.raises(ConfigError, match="--nnodes"):
        sglang.start(**LINKED, nnodes=2)
    other = LINKED["unified_cache_external_linker_config"] | {"linker_module_path": "other.linker"}
    assert sglang.start(**LINKED | {"unified_cache_external_linker_config": other}, nnodes=2) == {}
    wrong = {"linker_extra_config": {"cpu_cache_gb": "much"}}
    named = LINKED["unified_cache_external_linker_config"] | wrong
    with pytest.raises(ConfigError, match="cpu_cache_gb"):
        sglang.start(**LINKED | {"unified_cache_external_linker_config": named})


@pytest.mark.parametrize("in_use", ["error", "own"])
def test_data_parallel_engines_start_with_a_disk(
    sglang: SGLang, monkeypatch: pytest.MonkeyPatch, in_use: str
) -> None:
    monkeypatch.setenv("FLEXKV_SSD_CACHE_GB", "1")
    monkeypatch.setenv("FLEXKV_SSD_CACHE_DIR", "/nvme")
    monkeypatch.setenv("FLEXKV_SSD_IN_USE", in_use)
    assert sglang.start(dp_size=2)


DECODE = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}


def test_a_decode_server_with_a_prefix_cache_starts(sglang: SGLang) -> None:
    assert sglang.start(**DECODE)["enable_unified_cache_external_linker"] is True


def test_a_decode_server_that_keeps_hicaches_memory_is_refused(sglang: SGLang) -> None:
    said = "--disaggregation-decode-retraction-backup is host_pool"
    with pytest.raises(ConfigError, match=said):
        sglang.start(**DECODE, disaggregation_decode_retraction_backup="host_pool")


def test_a_decode_server_that_receives_into_hicaches_memory_is_refused(sglang: SGLang) -> None:
    said = "--disaggregation-decode-host-receive-threshold is 0.5"
    with pytest.raises(ConfigError, match=said):
        sglang.start(**DECODE, disaggregation_decode_host_receive_threshold=0.5)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.20"])
def test_an_older_sglang_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    old = SGLang(monkeypatch, version)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.resolution_hooks", None)
    plugin.register()
    (refuse,) = old.hooks.values()
    chosen = SimpleNamespace(server_args=SimpleNamespace(enable_flexkv=True))
    with pytest.raises(EngineVersionError, match=rf"SGLang {version} is installed.*0\.5\.23"):
        refuse(lambda context: "tree", chosen)
    other = SimpleNamespace(server_args=SimpleNamespace(enable_flexkv=False))
    assert refuse(lambda context: "tree", other) == "tree"


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang has all names")
def test_a_newer_sglang_without_a_name_that_is_used_is_refused() -> None:
    with pytest.raises(EngineVersionError, match="it lacks sglang"):
        check_version(False, "0.6.0")


def test_an_untested_sglang_may_be_allowed() -> None:
    check_version(True, "0.6.0")
