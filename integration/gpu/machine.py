# SPDX-License-Identifier: Apache-2.0
"""The machine that a report is about."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import io
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

_QUERIES = {
    "driver": "driver_version",
    "memory": "memory.total",
    "link generation, most": "pcie.link.gen.max",
    "link width, most": "pcie.link.width.max",
    "power limit": "power.limit",
    "SM clock, most": "clocks.max.sm",
}
_VERSIONS = ("torch", "triton", "vllm", "flexkv", "flexkv-kernels", "flexkv-vllm")


def describe_machine(command: list[str]) -> dict[str, str]:
    """What a reader must know to judge the figures. Initialises CUDA in this process."""
    import torch

    from flexkv.system.numa import node_of_device
    from flexkv_kernels import cuda_device
    from integration.gpu.device import DEVICE

    device = cuda_device(DEVICE)
    node = node_of_device(device.pci_bus_id)
    return {
        "device": device.name,
        "PCI address": device.pci_bus_id,
        "compute capability": "{}.{}".format(*device.capability),
        "multiprocessors": str(device.multiprocessors),
        "CUDA of the driver": "{}.{}".format(*device.driver_version),
        "CUDA of torch": str(torch.version.cuda),
        **_asked_of_nvidia_smi(device.pci_bus_id),
        "NUMA node": "unknown" if node is None else str(node),
        **host(),
        "command": " ".join(command),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def host() -> dict[str, str]:
    """What needs no GPU to be known."""
    return {
        "processor": _processor(),
        "processors usable": str(len(os.sched_getaffinity(0))),
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{name: _version(name) for name in _VERSIONS},
    }


def slug(device: str) -> str:
    """A file's name for a device: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def parse_query(text: str) -> dict[str, str]:
    """The answer of nvidia-smi, one line of comma-separated values in the order of the queries."""
    values = next(csv.reader(io.StringIO(text), skipinitialspace=True), [])
    return dict(zip(_QUERIES, values, strict=False))


def _asked_of_nvidia_smi(bus_id: str) -> dict[str, str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    query = [f"--query-gpu={','.join(_QUERIES.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [command, f"--id={bus_id}", *query],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_query(done.stdout)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
