# SPDX-License-Identifier: Apache-2.0
"""The files of `deploy/` agree with FlexKV's settings, with Mooncake's options and with each other.

Lint checks the compose file against the schema of compose."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexkv.config import settings
from integration.harness.connector import CONNECTOR

_DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "cluster"
_COMPOSE: dict[str, Any] = yaml.safe_load((_DEPLOY / "compose.yaml").read_text())
_UNITS = sorted(_DEPLOY.glob("*.service"))
_VARIABLE = re.compile(r"\bFLEXKV_[A-Z_]+")


def command_of(unit: str) -> list[str]:
    """The command line of a unit."""
    parser = configparser.ConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(_DEPLOY / f"{unit}.service")
    return shlex.split(parser["Service"]["ExecStart"])


def test_variables_are_settings() -> None:
    known = {setting.metadata["env"] for setting in settings()}
    used = {
        name
        for path in (*_UNITS, _DEPLOY / "compose.yaml")
        for name in _VARIABLE.findall(path.read_text())
    }
    assert len(used) > 3
    assert used <= known


@pytest.mark.parametrize(
    "command",
    [_COMPOSE["services"]["engine"]["command"], command_of("flexkv-vllm")],
    ids=["compose", "systemd"],
)
def test_engines_load_flexkv(command: list[str]) -> None:
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == CONNECTOR
    assert config["kv_load_failure_policy"] == "recompute"


def test_both_start_the_master_at_the_ports_that_engines_ask() -> None:
    compose = _COMPOSE["services"]["mooncake-master"]["command"]
    assert compose[1:] == command_of("mooncake-master")[1:]
    engine = _COMPOSE["services"]["engine"]["environment"]
    assert engine["FLEXKV_MOONCAKE_MASTER"].rpartition(":")[2] == option(compose, "rpc_port")
    port = option(compose, "http_metadata_server_port")
    assert engine["FLEXKV_MOONCAKE_METADATA"].endswith(f":{port}/metadata")


def option(command: list[str], name: str) -> str:
    (found,) = [each for each in command if each.startswith(f"--{name}=")]
    return found.partition("=")[2]


def test_mooncake_knows_the_options() -> None:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.skip("Mooncake Store is not installed: pip install 'flexkv[mooncake]'")
    master = Path(spec.origin).parent / "mooncake_master"
    told = subprocess.run([master, "--help"], capture_output=True, text=True, check=False).stdout
    known = set(re.findall(r"^\s*-(\w+) \(", told, re.MULTILINE))
    if not known:
        pytest.skip("mooncake_master does not run here: libraries are missing")
    used = {each[2:].partition("=")[0] for each in command_of("mooncake-master")[1:]}
    assert used <= known


@pytest.mark.parametrize("unit", _UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # It looks for the programs, which are not on this machine.
    found = shutil.which("true")
    assert found is not None
    text = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={found}", unit.read_text())
    (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / unit.name],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if unit.name in line]
    assert complaints == []
