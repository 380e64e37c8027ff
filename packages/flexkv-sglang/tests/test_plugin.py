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

from flexkv import ConfigError, EngineVersionError
from flexkv_sglang import plugin
from flexkv_sglang.compat import check_version
from flexkv_sglang.settings import read_settings


class SGLang:
    """What the plugin registered and declared."""

    def __init__(self, patch: pytest.MonkeyPatch, version: str) -> None:
        self.declared: dict[str, Any] = {}
        self.steps: dict[str, Callable[..., None]] = {}
        self.hooks: dict[str, Callable[..., Any]] = {}
        modules = {
            "sglang": {"__version__": version},
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
        given = SimpleNamespace(**{"enable_flexkv": True, "flexkv_config_file": None} | arguments)
        done = []
        (step,) = self.steps.values()
        step(given, done.append)
        assert done == [given]
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
        ("pp_size", 2, "SGLang's --pp-size (--pipeline-parallel-size) is 2; allowed .* FlexKV: 1"),
        ("nnodes", 2, "--nnodes is 2"),
        ("attn_cp_size", 2, "--attn-cp-size (--attention-context-parallel-size) is 2"),
        ("dcp_size", 2, "--dcp-size (--decode-context-parallel-size) is 2"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache (--enable-hicache) is"),
        ("enable_lmcache", True, "--enable-lmcache is set"),
        ("disable_radix_cache", True, "off, by --disable-radix-cache or by SGLang's choice"),
        ("dllm_algorithm", "LowConfidence", "--dllm-algorithm is 'LowConfidence'"),
        ("disaggregation_mode", "decode", "also --disaggregation-decode-enable-radix-cache"),
    ],
)
def test_what_cannot_be_cached_right_is_refused(
    sglang: SGLang, name: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.sub(r"([()])", r"\\\1", said)):
        sglang.start(**{name: value})


@pytest.mark.parametrize(
    ("engines", "in_use", "starts"),
    [(1, "error", True), (2, "error", False), (2, "own", True)],
)
def test_data_parallel_engines_need_disk_caches_of_their_own(
    sglang: SGLang,
    monkeypatch: pytest.MonkeyPatch,
    engines: int,
    in_use: str,
    starts: bool,
) -> None:
    assert sglang.start(dp_size=2)  # without a disk
    monkeypatch.setenv("FLEXKV_SSD_CACHE_GB", "1")
    monkeypatch.setenv("FLEXKV_SSD_CACHE_DIR", "/nvme")
    monkeypatch.setenv("FLEXKV_SSD_IN_USE", in_use)
    if starts:
        assert sglang.start(dp_size=engines)
        return
    with pytest.raises(ConfigError, match=r"--data-parallel-size\) is 2 .*ssd_in_use=own"):
        sglang.start(dp_size=engines)


DECODE = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}


def test_a_decode_server_with_a_prefix_cache_starts(sglang: SGLang) -> None:
    assert sglang.start(**DECODE)["enable_unified_cache_external_linker"] is True


def test_a_decode_server_that_keeps_hicaches_memory_is_refused(sglang: SGLang) -> None:
    said = "--disaggregation-decode-retraction-backup is host_pool"
    with pytest.raises(ConfigError, match=said):
        sglang.start(**DECODE, disaggregation_decode_retraction_backup="host_pool")


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


def test_a_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_SERVICE", "/s")
    with pytest.raises(ConfigError, match="service is '/s', and only vLLM's"):
        read_settings({})
