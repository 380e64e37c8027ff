# SPDX-License-Identifier: Apache-2.0
"""The files of `deploy/`, read: what they start, and with which settings."""

from __future__ import annotations

import configparser
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CLUSTER = DEPLOY / "cluster"
UNITS = sorted(DEPLOY.rglob("*.service"))

CLUSTER_COMPOSE: dict[str, Any] = yaml.safe_load((CLUSTER / "compose.yaml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = [
    document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
(POD,) = [each["spec"]["template"]["spec"] for each in KUBERNETES if each["kind"] == "StatefulSet"]
(CONTAINER,) = POD["containers"]
(MONITOR,) = yaml.safe_load_all((DEPLOY / "kubernetes/monitoring/servicemonitor.yaml").read_text())
KUBERNETES_NODE: list[dict[str, Any]] = list(
    yaml.safe_load_all((DEPLOY / "node" / "kubernetes.yaml").read_text())
)
NODE: dict[str, dict[str, Any]] = {
    each["kind"]: each["spec"]["template"]["spec"]
    for each in KUBERNETES_NODE
    if "template" in each["spec"]
}
"""Pods of the node's service and of its engines, by the kind of what makes them."""
(NODE_CACHE,), (NODE_ENGINE,) = (NODE[kind]["containers"] for kind in ("DaemonSet", "Deployment"))


def service_of(unit: str) -> Mapping[str, str]:
    """What a unit of systemd says of its service."""
    parser = configparser.ConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    (path,) = DEPLOY.rglob(f"{unit}.service")
    parser.read(path)
    return parser["Service"]


def command_of(unit: str) -> list[str]:
    """The command line of a unit of systemd."""
    return shlex.split(service_of(unit)["ExecStart"])


ENGINES: dict[str, list[str]] = {
    "cluster": CLUSTER_COMPOSE["services"]["engine"]["command"],
    "compose-cuda": COMPOSE["services"]["cuda"]["command"],
    "compose-cpu": ["vllm", "serve", *COMPOSE["services"]["cpu"]["command"]],
    "kubernetes": [*CONTAINER["command"], *CONTAINER["args"]],
    "kubernetes-node": [*NODE_ENGINE["command"], *NODE_ENGINE["args"]],
    "systemd": command_of("flexkv-vllm"),
}
"""Command lines of engines: program, `serve`, arguments. That of the image for CPUs is the same
server under another name."""
