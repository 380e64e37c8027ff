# SPDX-License-Identifier: Apache-2.0
"""vLLM's own configuration is built, in a process of its own: what the plugin does to vLLM's
factory stays there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from patience import PATIENCE_SECONDS
from world_config import LLAMA

_CONFIGURE = """
import json, logging, os, sys
from vllm.engine.arg_utils import EngineArgs

class Lines(logging.Handler):
    def emit(self, record):
        print("said", record.levelname, record.getMessage())

logging.getLogger("flexkv_vllm").addHandler(Lines())
for transfer, environ, flags in json.loads(sys.argv[2]):
    os.environ.update(environ)
    try:
        EngineArgs(
            model=sys.argv[1], skip_tokenizer_init=True, kv_transfer_config=transfer, **flags
        ).create_engine_config()
    except Exception as error:
        print("said", type(error).__name__, error)
    print("said -")
    for name in environ:
        del os.environ[name]
"""


class Case(NamedTuple):
    """says: how the line begins that building the configuration logs or raises; "-" for none."""

    transfer: dict[str, Any] | None
    environ: dict[str, str]
    says: str
    flags: dict[str, object] | None = None


def _transfer(connector: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


_OURS = "FlexKVConnectorV1"
_BAD = _transfer(_OURS, cpu_cash_gb=1)
_BAD_VARIABLE = {"FLEXKV_CPU_CACHE_GB": "lots"}
_HOST = {"FLEXKV_CPU_CACHE_GB": "1"}
_LMCACHE = {"LMCACHE_CHUNK_SIZE": "256"}
_OTHER = _transfer("ExampleConnector")
_OFFLOADING = {
    "spec_name": "FlexKVOffloadingSpec",
    "spec_module_path": "flexkv_vllm.offloading",
    "block_size": 32,
}
_UNKNOWN = "ConfigError unknown key 'cpu_cash_gb'"
_WITHOUT_EFFECT = "WARNING FLEXKV_CPU_CACHE_GB: set, but without effect"

CASES = {
    "a bad key": Case(_BAD, {}, _UNKNOWN),
    "a bad variable": Case(
        _transfer(_OURS), _BAD_VARIABLE, "ConfigError 'lots' from environment variable"
    ),
    "good settings": Case(_transfer(_OURS, cpu_cache_gb=1), {}, "-"),
    "a good variable": Case(_transfer(_OURS), _HOST, "-"),
    "a bad key of the spec": Case(
        _transfer("OffloadingConnector", **_OFFLOADING, cpu_cash_gb=1), {}, _UNKNOWN
    ),
    "the spec beside vLLM's own keys": Case(
        _transfer("OffloadingConnector", **_OFFLOADING), {}, "-"
    ),
    "one of several": Case(_transfer("MultiConnector", connectors=[_OTHER, _BAD]), {}, _UNKNOWN),
    "another connector and a bad variable": Case(_OTHER, _BAD_VARIABLE, _WITHOUT_EFFECT),
    "another connector": Case(_OTHER, _HOST, _WITHOUT_EFFECT),
    "no connector": Case(None, _HOST, _WITHOUT_EFFECT),
    "a size beside FlexKV": Case(
        _transfer(_OURS),
        {},
        "ERROR vLLM replaces FlexKV by OffloadingConnector, because --kv-offloading-size",
        {"kv_offloading_size": 1.0},
    ),
    "LMCache's variables": Case(
        _transfer(_OURS), _LMCACHE, "WARNING LMCACHE_CHUNK_SIZE: set, but without"
    ),
    "LMCache's variables alone": Case(None, _LMCACHE, "-"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What building vLLM's configuration says in each case, all in one process."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(LLAMA))
    cases = [(case.transfer, case.environ, case.flags or {}) for case in CASES.values()]
    result = subprocess.run(
        [sys.executable, "-c", _CONFIGURE, str(model), json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.removeprefix("said ") for line in result.stdout.splitlines() if "said " in line]
    found: dict[str, list[str]] = {}
    for name in CASES:
        found[name] = lines[: lines.index("-") + 1]
        lines = lines[len(found[name]) :]
    return found


@pytest.mark.parametrize("case", CASES)
def test_settings_are_checked_and_reported_once_in_the_first_process(
    said: dict[str, list[str]], case: str
) -> None:
    says = CASES[case].says
    assert said[case][0].startswith(says)
    assert len(said[case]) == (1 if says == "-" else 2)


def test_a_bad_setting_ends_vllms_command_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(tmp_path)]
    command += ["--skip-tokenizer-init", "--kv-transfer-config", json.dumps(_BAD)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=4 * PATIENCE_SECONDS
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("flexkv.types.errors.ConfigError: unknown key 'cpu_cash_gb'")
