# SPDX-License-Identifier: Apache-2.0
"""vLLM's own configuration is built, in a process of its own: what the plugin does to vLLM's
factory stays there."""

from __future__ import annotations

import json
import subprocess
import sys
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
