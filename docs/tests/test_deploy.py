# SPDX-License-Identifier: Apache-2.0
"""The files of `deploy/` agree with FlexKV's settings, with the engines, with Mooncake's options
and with each other. Lint checks them against their schemas; no test starts a container."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import stat
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
    KUBERNETES_NODE,
    MONITOR,
    NODE,
    NODE_CACHE,
    NODE_ENGINE,
    POD,
    UNITS,
    command_of,
    service_of,
)
from flexkv import CacheConfig, cli
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
    own = NODE_ENGINE["securityContext"] | {"readOnlyRootFilesystem": True}
    assert NODE_CACHE["securityContext"] == own, "the same user"
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
        def __init__(
            self, root: str, config: CacheConfig, figures: socket.socket, pools: object
        ) -> None:
            begun.append((root, config.cpu_cache_gb, figures.getsockname()[0]))
            figures.close()

        def run(self) -> None: ...
        def close(self, _: float) -> None: ...

    monkeypatch.setattr(serve, "NodeServer", Begun)
    monkeypatch.setattr(serve, "listen_at", lambda host, _: socket.create_server((host, 0)))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(serve, "configure_logging", lambda _: None)
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "1")
    assert Path(command[0]).name == "flexkv"
    assert cli.main(command[1:]) == 0
    ((root, gb, host),) = begun
    assert (root.startswith("/run/flexkv"), gb) == (True, 1)
    assert f"{host}:9470" in command


RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}
"""The volumes that the restricted profile of Kubernetes allows."""


def breaches(pod: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """What a container has against the restricted profile of Kubernetes, apart from volumes."""
    context = pod["securityContext"] | container["securityContext"]
    rules = {
        "runAsNonRoot": context.get("runAsNonRoot") is True,
        "runAsUser": context.get("runAsUser", 0) != 0,
        "seccompProfile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
        "privileged": not context.get("privileged"),
        "capabilities": context["capabilities"] == {"drop": ["ALL"]},
        "host": not {"hostNetwork", "hostIPC", "hostPID"} & pod.keys(),
        "hostPort": not any("hostPort" in each for each in container.get("ports", ())),
    }
    return [name for name, holds in rules.items() if not holds]


def test_engines_keep_to_the_restricted_profile() -> None:
    assert breaches(POD, CONTAINER) == []
    kinds = {kind for volume in POD["volumes"] for kind in volume if kind != "name"}
    assert kinds <= RESTRICTED_VOLUMES
    context = POD["securityContext"]
    assert context["fsGroup"] == context["runAsUser"], "else it cannot make its folder"
    assert context["fsGroupChangePolicy"] == "OnRootMismatch", "else each mount costs all blocks"


def test_a_node_has_folders_of_its_own_as_the_only_breach() -> None:
    for pod, container in ((NODE["DaemonSet"], NODE_CACHE), (NODE["Deployment"], NODE_ENGINE)):
        assert breaches(pod, container) == []
    (folders,) = NODE["DaemonSet"]["initContainers"]
    assert breaches(NODE["DaemonSet"], folders) == ["runAsNonRoot", "runAsUser", "capabilities"]
    assert folders["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    values = {each["name"]: each["value"] for each in NODE_CACHE["env"]}
    user = NODE["DaemonSet"]["securityContext"]["runAsUser"]
    (command,) = folders["args"]
    assert (
        f"chown {user}:{user} {NODE_CACHE['args'][0]} {values['FLEXKV_SSD_CACHE_DIR']}" in command
    )
    # As the image's user, whose home the engine's libraries look for.
    for image in (DEPLOY / "images").iterdir():
        assert f"useradd --create-home --uid {user} flexkv" in image.read_text()


def test_the_folders_of_a_node_can_be_made_again(tmp_path: Path) -> None:
    (folders,) = NODE["DaemonSet"]["initContainers"]
    (command,) = folders["args"]
    me = f"{os.getuid()}:{os.getgid()}"
    here = re.sub(r"(?<= )/", f"{tmp_path}/", command).replace("10001:10001", me)
    for folder in ("run/flexkv", "cache"):
        (tmp_path / folder).mkdir(parents=True)
    for _ in range(2):
        subprocess.run([*folders["command"], here], check=True)
        for folder in ("run/flexkv/node", "cache/flexkv"):
            assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700


@pytest.mark.parametrize("container", [CONTAINER, NODE_ENGINE, NODE_CACHE])
def test_probes_wait_longer_than_a_busy_server_takes(container: dict[str, Any]) -> None:
    probes = {name: each for name, each in container.items() if name.endswith("Probe")}
    assert probes.keys() >= {"readinessProbe", "livenessProbe"}
    assert all(each["timeoutSeconds"] >= 5 for each in probes.values())
    alive = probes["livenessProbe"]
    assert alive["failureThreshold"] * alive["periodSeconds"] >= 60
    assert all(each["httpGet"]["path"] == "/health" for each in probes.values())


@pytest.mark.parametrize("documents", [KUBERNETES, KUBERNETES_NODE], ids=["engines", "node"])
def test_every_pod_has_a_policy_of_the_network(documents: list[dict[str, Any]]) -> None:
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in documents
        if each["kind"] == "NetworkPolicy"
    }
    for each in (each for each in documents if "template" in each.get("spec", {})):
        pod, policy = each["spec"]["template"], policies.pop(each["metadata"]["name"])
        assert policy["policyTypes"] == ["Ingress"]
        chosen = policy["podSelector"]["matchLabels"].items()
        assert chosen <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    assert not policies


def test_prometheus_finds_the_engines() -> None:
    wanted = MONITOR["spec"]["selector"]["matchLabels"].items()
    services = [
        each
        for each in KUBERNETES
        if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
    ]
    (service,) = services  # two would scrape each pod twice
    (endpoint,) = MONITOR["spec"]["endpoints"]
    assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"


@pytest.mark.parametrize("compose", [COMPOSE, CLUSTER_COMPOSE], ids=["one", "cluster"])
def test_services_of_compose_have_a_check_and_a_bound(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        kind, program, flag, code = service["healthcheck"]["test"]
        assert (kind, program, flag) == ("CMD", "python3", "-c")
        compile(code, "healthcheck", "exec")
        assert service["mem_limit"]
        assert service["pids_limit"]
        assert all(port.startswith("${ADDRESS:-127.0.0.1}:") for port in service.get("ports", ()))


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
