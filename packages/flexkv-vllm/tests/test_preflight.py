# SPDX-License-Identifier: Apache-2.0
"""vLLM's own configuration is built, in a process of its own: what the plugin does to vLLM's
factory stays there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_SECONDS
from world_config import LLAMA

_CONFIGURE = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs

for case in json.loads(sys.argv[2]):
    os.environ.update(case["environ"])
    try:
        EngineArgs(
            model=sys.argv[1], skip_tokenizer_init=True, kv_transfer_config=case["transfer"]
        ).create_engine_config()
    except Exception as error:
        print("ended", type(error).__name__, error)
    else:
        print("ended accepted")
    for name in case["environ"]:
        del os.environ[name]
"""
_BAD = {"kv_connector_extra_config": {"cpu_cash_gb": 1}}
_BAD_VARIABLE = {"FLEXKV_CPU_CACHE_GB": "lots"}
_OFFLOADING = {
    "spec_name": "FlexKVOffloadingSpec",
    "spec_module_path": "flexkv_vllm.offloading",
    "block_size": 32,
}
_MULTI = {
    "connectors": [
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both", **_BAD},
    ]
}
_OURS = "FlexKVConnectorV1"
_UNKNOWN = "ConfigError unknown key 'cpu_cash_gb'"

CASES: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    # connector, its extra config, environment, how what it ends with begins
    "a bad key": (_OURS, {"cpu_cash_gb": 1}, {}, _UNKNOWN),
    "a bad variable": (_OURS, {}, _BAD_VARIABLE, "ConfigError 'lots' from environment variable"),
    "good settings": (_OURS, {"cpu_cache_gb": 1}, {}, "accepted"),
    "a bad key of the spec": (
        "OffloadingConnector",
        _OFFLOADING | {"cpu_cash_gb": 1},
        {},
        _UNKNOWN,
    ),
    "the spec beside vLLM's own keys": ("OffloadingConnector", _OFFLOADING, {}, "accepted"),
    "one of several": ("MultiConnector", _MULTI, {}, _UNKNOWN),
    "another connector": ("ExampleConnector", {}, _BAD_VARIABLE, "accepted"),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What building vLLM's configuration ends with in each case, all in one process."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(LLAMA))
    cases = [
        {
            "transfer": {
                "kv_connector": name,
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
            "environ": environ,
        }
        for name, extra, environ, _ in CASES.values()
    ]
    result = subprocess.run(
        [sys.executable, "-c", _CONFIGURE, str(model), json.dumps(cases)],
        capture_output=True,
        text=True,
        check=True,
        timeout=4 * PATIENCE_SECONDS,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("ended ")]
    return dict(zip(CASES, (line.removeprefix("ended ") for line in lines), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_settings_are_checked_in_the_first_process(ends: dict[str, str], case: str) -> None:
    assert ends[case].startswith(CASES[case][3])


def test_a_bad_setting_ends_vllms_command_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    transfer = {"kv_connector": _OURS, "kv_role": "kv_both"} | _BAD
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(tmp_path)]
    command += ["--skip-tokenizer-init", "--kv-transfer-config", json.dumps(transfer)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=4 * PATIENCE_SECONDS
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("flexkv.types.errors.ConfigError: unknown key 'cpu_cash_gb'")


_REPORT = """
import json, logging, os, sys
from vllm.engine.arg_utils import EngineArgs

class Lines(logging.Handler):
    def emit(self, record):
        print("said", record.levelname, record.getMessage())

logging.getLogger("flexkv_vllm").addHandler(Lines())
for transfer, environ, flags in json.loads(sys.argv[2]):
    os.environ.update(environ)
    EngineArgs(
        model=sys.argv[1], skip_tokenizer_init=True, kv_transfer_config=transfer, **flags
    ).create_engine_config()
    print("said -")
    for name in environ:
        del os.environ[name]
"""
_FLEXKV = {"kv_connector": _OURS, "kv_role": "kv_both"}
_OTHER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
_SIZE = {"kv_offloading_size": 1.0}
_HOST = {"FLEXKV_CPU_CACHE_GB": "1"}
_LMCACHE = {"LMCACHE_CHUNK_SIZE": "256"}

REPORTS: dict[str, tuple[object, dict[str, str], dict[str, object], str]] = {
    # connector's configuration, environment, other flags, how the line that is logged begins
    "a size beside FlexKV": (
        _FLEXKV,
        {},
        _SIZE,
        "ERROR vLLM replaces FlexKV by OffloadingConnector, because --kv-offloading-size",
    ),
    "no connector": (None, _HOST, {}, "WARNING FLEXKV_CPU_CACHE_GB: set, but without effect"),
    "another connector": (_OTHER, _HOST, {}, "WARNING FLEXKV_CPU_CACHE_GB: set, but without"),
    "FlexKV": (_FLEXKV, _HOST, {}, "-"),
    "LMCache's variables": (_FLEXKV, _LMCACHE, {}, "WARNING LMCACHE_CHUNK_SIZE: set, but without"),
    "LMCache's variables alone": (None, _LMCACHE, {}, "-"),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that building vLLM's configuration logs in each case."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(LLAMA))
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            _REPORT,
            str(model),
            json.dumps([case[:3] for case in REPORTS.values()]),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    said = [line.removeprefix("said ") for line in result.stdout.splitlines() if "said " in line]
    lines: dict[str, list[str]] = {}
    for name in REPORTS:
        lines[name] = said[: said.index("-") + 1]
        said = said[len(lines[name]) :]
    return lines


@pytest.mark.parametrize("case", REPORTS)
def test_settings_without_effect_are_reported_once(
    reports: dict[str, list[str]], case: str
) -> None:
    begins = REPORTS[case][3]
    assert reports[case][0].startswith(begins)
    assert len(reports[case]) == (1 if begins == "-" else 2)
