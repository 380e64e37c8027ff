# SPDX-License-Identifier: Apache-2.0
"""The files of `deploy/` agree with FlexKV's settings, with the engines, with Mooncake's options
and with each other. Lint checks them against their schemas; no test starts a container."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs.tests.deployed import (
    CLUSTER_COMPOSE,
    COMPOSE,
    CONTAINER,
    DEPLOY,
    ENGINES,
    KUBERNETES,
    NODE,
    NODE_CACHE,
    NODE_ENGINE,
    POD,
    UNITS,
    command_of,
    service_of,
)
from flexkv import cli
from flexkv.cli import serve
from flexkv.settings import SETTINGS, load_config
from integration.harness.connector import CONNECTOR

_VARIABLE = re.compile(r"\bFLEXKV_[A-Z_]+")
_COMPOSED = re.compile(r"\$\{\w+(?::-(.*?))?(?::\?.*?)?\}")


def test_variables_are_settings() -> None:
    known = {setting.variable for setting in SETTINGS.values()}
    used = {
        name
        for path in (*UNITS, *DEPLOY.rglob("*.yaml"))
        for name in _VARIABLE.findall(path.read_text())
    }
    assert len(used) > 6
    assert used <= known


@pytest.mark.parametrize(
    "environment",
    [
        COMPOSE["services"]["cuda"]["environment"],
        COMPOSE["services"]["cpu"]["environment"],
        {each["name"]: each["value"] for each in CONTAINER["env"]},
        {each["name"]: each["value"] for each in NODE_CACHE["env"]},
    ],
    ids=["compose-cuda", "compose-cpu", "kubernetes", "kubernetes-node"],
)
def test_values_of_settings_are_allowed(environment: dict[str, Any]) -> None:
    values = {name: _COMPOSED.sub(r"\1", str(value)) for name, value in environment.items()}
    config = load_config({}, environ=values)
    assert config.cpu_cache_gb
    assert config.ssd_cache_gb
    # Made by the engine's own user, whoever owns the volume above it.
    assert config.ssd_cache_dir == ("/cache/flexkv",)


@pytest.mark.parametrize("command", ENGINES.values(), ids=ENGINES)
def test_engines_load_flexkv(command: list[str]) -> None:
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == CONNECTOR
    assert config["kv_load_failure_policy"] == "recompute"


def test_engines_are_killed_later_than_they_end() -> None:
    services = [COMPOSE["services"]["cuda"], COMPOSE["services"]["cpu"]]
    services.append(CLUSTER_COMPOSE["services"]["engine"])
    unit = service_of("flexkv-vllm")
    kills = [(each["command"], each["stop_grace_period"]) for each in services]
    kills.append((CONTAINER["args"], POD["terminationGracePeriodSeconds"]))
    kills.append((NODE_ENGINE["args"], NODE["Deployment"]["terminationGracePeriodSeconds"]))
    kills.append((command_of("flexkv-vllm"), unit["TimeoutStopSec"]))
    for command, seconds in kills:
        given = option(command, "shutdown-timeout")
        assert int(given) < int(str(seconds).removesuffix("s"))
    # Else systemd ends the workers at once, and requests under way fail.
    assert unit["KillMode"] == "mixed"


def test_a_pod_has_the_memory_and_the_drive_that_its_settings_take() -> None:
    values = {each["name"]: each["value"] for each in CONTAINER["env"]}
    memory = int(CONTAINER["resources"]["limits"]["memory"].removesuffix("Gi"))
    (shm,) = [each["emptyDir"] for each in POD["volumes"] if each["name"] == "shm"]
    taken = int(values["FLEXKV_CPU_CACHE_GB"]) + int(shm["sizeLimit"].removesuffix("Gi"))
    assert taken < memory
    for document in KUBERNETES:
        for claim in document["spec"].get("volumeClaimTemplates", []) if "spec" in document else []:
            room = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
            assert int(values["FLEXKV_SSD_CACHE_GB"]) < room


def test_engines_of_a_node_find_its_service() -> None:
    engine = {each["name"]: each["value"] for each in NODE_ENGINE["env"]}
    root, http, address = NODE_CACHE["args"]
    assert (load_config({}, environ=engine).service, http) == (root, "--http")
    (port,) = (each["containerPort"] for each in NODE_CACHE["ports"])
    assert address == f"0.0.0.0:{port}"
    mounts = [
        {each["name"]: each["mountPath"] for each in container["volumeMounts"]}["run"]
        for container in (NODE_CACHE, NODE_ENGINE)
    ]
    assert [root.startswith(f"{each}/") for each in mounts] == [True, True]
    paths = [
        each["hostPath"]["path"]
        for pod in NODE.values()
        for each in pod["volumes"]
        if each["name"] == "run"
    ]
    assert len(paths) == 2
    assert len(set(paths)) == 1
    assert NODE_CACHE["securityContext"] == NODE_ENGINE["securityContext"], "the same user"
    assert not any({"hostIPC", "hostPID"} & pod.keys() for pod in NODE.values())


def test_a_node_has_the_memory_and_the_time_that_its_service_takes() -> None:
    values = {each["name"]: each["value"] for each in NODE_CACHE["env"]}
    memory = int(NODE_CACHE["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert int(values["FLEXKV_CPU_CACHE_GB"]) < memory
    unit = service_of("flexkv-node")
    assert unit["RuntimeDirectoryMode"] == "0700"
    seconds = (unit["TimeoutStopSec"], NODE["DaemonSet"]["terminationGracePeriodSeconds"])
    assert all(int(each) > serve.FLUSH_SECONDS for each in seconds)


@pytest.mark.parametrize(
    "command",
    [command_of("flexkv-node"), [*NODE_CACHE["command"], *NODE_CACHE["args"]]],
    ids=["systemd", "kubernetes"],
)
def test_the_service_of_a_node_takes_its_arguments(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, float | None, str]] = []

    class Begun:
        def __init__(self, root: str, _: object, gb: float | None, figures: socket.socket) -> None:
            begun.append((root, gb, figures.getsockname()[0]))
            figures.close()

        def run(self) -> None: ...
        def close(self, _: float) -> None: ...

    monkeypatch.setattr(serve, "NodeServer", Begun)
    monkeypatch.setattr(serve, "listen_at", lambda host, _: socket.create_server((host, 0)))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(serve, "configure_logging", lambda _: None)
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "256")
    assert Path(command[0]).name == "flexkv"
    assert cli.main(command[1:]) == 0
    ((root, gb, host),) = begun
    assert (root.startswith("/run/flexkv"), gb) == (True, 256)
    assert f"{host}:9470" in command


def test_images_have_the_engines_that_the_tests_run() -> None:
    text = (DEPLOY.parent / "noxfile.py").read_text()
    tested = dict(re.findall(r'^(\w+)_VERSION = "(.*)"$', text, re.MULTILINE))
    cuda = (DEPLOY / "images" / "Dockerfile.cuda").read_text()
    assert f"ARG ENGINE_IMAGE=vllm/vllm-openai:v{tested['VLLM']}\n" in cuda
    assert f"lmsysorg/sglang:v{tested['SGLANG']} " in cuda
    cpu = (DEPLOY / "images" / "Dockerfile.cpu").read_text()
    assert f"ARG VLLM_VERSION={tested['VLLM']}\n" in cpu


def test_what_images_copy_is_there() -> None:
    for image in sorted((DEPLOY / "images").iterdir()):
        copied = re.findall(r"^COPY (?!--from)(\S+) ", image.read_text(), re.MULTILINE)
        assert copied
        assert [path for path in copied if not (DEPLOY.parent / path).exists()] == []


@pytest.mark.parametrize("compose", [COMPOSE, CLUSTER_COMPOSE], ids=["one", "cluster"])
def test_compose_builds_images_that_exist(compose: dict[str, Any]) -> None:
    files = {each["build"]["dockerfile"] for each in compose["services"].values()}
    assert files
    assert [file for file in files if not (DEPLOY.parent / file).is_file()] == []


def test_both_start_the_master_at_the_ports_that_engines_ask() -> None:
    compose = CLUSTER_COMPOSE["services"]["mooncake-master"]["command"]
    assert compose[1:] == command_of("mooncake-master")[1:]
    engine = CLUSTER_COMPOSE["services"]["engine"]["environment"]
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


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
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
