# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine: kernel, memory, GPU, FlexKV's runtime directory, service and trace."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from flexkv.engine.recorder import check_trace
from flexkv.layout import USUAL_BLOCK
from flexkv.preflight.findings import Finding, Level
from flexkv.service.messages import SOCKET
from flexkv.session.runtime_directory import RuntimeDirectory, check_runtime_directory
from flexkv.settings import GIB, CacheConfig
from flexkv.system.available import available_memory, free_huge_pages, total_memory
from flexkv.system.native import kernels
from flexkv.system.numa import processors_of
from flexkv.types.errors import ConfigError
from flexkv.types.texts import exact, size

_OLDEST_KERNEL = (4, 16)
"""memfd_create with pages of 2 MiB came with 4.14, its seals for them with 4.16."""

_FILLING_KERNEL = (5, 14)
"""MADV_POPULATE_WRITE, by which threads fill an arena in parallel, came with 5.14."""

_LEAST_SHM = GIB
"""Bytes in /dev/shm that engines with several ranks should have for themselves; Docker gives
64 MiB."""

_SERVICE_SECONDS = 5.0
"""Time limit for the connection to a service, whose loop may be busy."""

_SMI_SECONDS = 5.0
"""Time limit for nvidia-smi, which hangs if the driver does."""


def check_kernel() -> Iterator[Finding]:
    """Check whether the system is Linux and new enough for the calls that FlexKV makes."""
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    text = f"{platform.system()} {release}, {platform.machine()}"
    if platform.system() != "Linux" or version < _OLDEST_KERNEL:
        oldest = ".".join(map(str, _OLDEST_KERNEL))
        yield Finding("kernel", Level.PROBLEM, text, f"use Linux {oldest} or newer")
    elif version < _FILLING_KERNEL:
        change = "Linux 5.14 or newer fills host memory faster at the start"
        yield Finding("kernel", Level.ADVICE, text, change)
    else:
        yield Finding("kernel", Level.OK, text)


def check_memory(config: CacheConfig) -> Iterator[Finding]:
    """Check the room for the arena, in ordinary and in huge pages, and the room in /dev/shm."""
    available, pool = available_memory(), free_huge_pages()
    wanted = None if config.cpu_cache_gb is None else int(config.cpu_cache_gb * GIB)
    text = f"{size(available)} available to this process, control groups counted"
    if wanted is None:
        yield Finding("memory", Level.OK, f"{text}; cpu_cache_gb is not set: FlexKV chooses")
    elif wanted < USUAL_BLOCK:
        text = f"{size(wanted)} wanted, less than one usual block of {size(USUAL_BLOCK)}"
        yield Finding("memory", Level.PROBLEM, text, "raise cpu_cache_gb: its unit is GiB")
    elif max(available, pool) < wanted:
        change = "lower cpu_cache_gb, or raise the limit of the container or the service"
        level = Level.ADVICE if config.memory_grows else Level.PROBLEM
        yield Finding("memory", level, f"{text}, {size(wanted)} wanted", change)
    else:
        yield Finding("memory", Level.OK, f"{text}; {size(wanted)} wanted")
    yield _huge_pages(wanted, pool)
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        yield Finding("shared memory", Level.ADVICE, "/dev/shm is missing", "mount a tmpfs there")
        return
    total = status.f_blocks * status.f_frsize
    if total < _LEAST_SHM:
        change = "for engines with several ranks: docker run --ipc=host, or --shm-size 8g"
        yield Finding("shared memory", Level.ADVICE, f"/dev/shm has {size(total)}", change)
    else:
        text = f"/dev/shm has {size(total)}; FlexKV's own memory does not count there"
        yield Finding("shared memory", Level.OK, text)


def refuse_memory(config: CacheConfig) -> None:
    """Refuse more host memory than the machine has. What other processes have of it counts at the
    start: those of a service that starts again hand it back. Raises ConfigError if `cpu_cache_gb`
    is more, and no memory is to come (`memory_grows`)."""
    wanted, total = config.cpu_cache_gb, total_memory()
    if wanted is not None and wanted * GIB > total and not config.memory_grows:
        raise ConfigError(
            f"cpu_cache_gb is {exact(wanted)} GiB; allowed: at most {total / GIB:.2f} GiB, which "
            "this machine and its control groups have, or memory_grows if the machine gets more"
        )


def check_limits(config: CacheConfig) -> Iterator[Finding]:
    """Check the limit of locked memory, which RDMA needs, and whether this process may run on all
    NUMA nodes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    wanted = int((config.cpu_cache_gb or 0) * GIB)
    rdma = config.mooncake_master is not None and config.mooncake_protocol == "rdma"
    if rdma and soft != resource.RLIM_INFINITY and soft <= wanted:
        change = "RDMA pins host memory: ulimit -l unlimited, or --ulimit memlock=-1"
        yield Finding("locked memory", Level.PROBLEM, text, change)
    else:
        yield Finding("locked memory", Level.OK, text)
    folder = "/sys/devices/system/node"
    count = len(list(Path(folder).glob("node[0-9]*")))
    nodes = [node for node in range(count) if processors_of(node)]
    usable = os.sched_getaffinity(0)
    reached = [node for node in nodes if processors_of(node) & usable]
    text = f"{max(1, len(nodes))} with processors, {len(usable)} processors usable"
    if len(reached) < len(nodes):
        change = "processors of the other nodes are not allowed (numactl, cpusets): host memory "
        change += "comes from the allowed ones"
        yield Finding("NUMA nodes", Level.ADVICE, text, change)
    else:
        yield Finding("NUMA nodes", Level.OK, text)


def check_gpu() -> Iterator[Finding]:
    """Check GPUs, their driver, and whether the kernels find a device that they can use."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Finding("GPU", Level.OK, "no nvidia-smi: engines on CPUs only")
        return
    query = [smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        ended = subprocess.run(
            query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        change = "the driver hangs; see the kernel's log (dmesg)"
        yield Finding("GPU", Level.PROBLEM, f"nvidia-smi took over {_SMI_SECONDS:g} s", change)
        return
    lines = [line.strip() for line in ended.stdout.splitlines() if line.strip()]
    if ended.returncode or not lines:
        why = (ended.stderr or ended.stdout).strip().splitlines()[:1]
        change = "repair the driver, or give the container the GPU (--gpus all)"
        yield Finding("GPU", Level.PROBLEM, f"nvidia-smi fails: {''.join(why)}", change)
        return
    yield Finding("GPU", Level.OK, f"{len(lines)}: {lines[0]}")
    try:
        reason = kernels("cuda_device").cuda_unavailable()
    except (ConfigError, OSError) as error:
        yield Finding("GPU", Level.PROBLEM, f"no kernels: {error}", "pip install flexkv-kernels")
        return
    if reason is not None:
        change = "install a build of flexkv-kernels with CUDA, and a driver that is new enough"
        yield Finding("GPU", Level.PROBLEM, f"flexkv-kernels cannot use it: {reason}", change)
    else:
        yield Finding("GPU", Level.OK, "flexkv-kernels can use it")


def check_runtime_dir(config: CacheConfig) -> Iterator[Finding]:
    """Check the directory where an engine's processes meet. A missing directory is not created."""
    path = config.session_root
    exists = check_runtime_directory(path)
    text = "belongs to this user alone" if exists else "does not exist: an engine creates it"
    yield Finding("runtime_dir", Level.OK, f"{path} {text}")


def check_service(config: CacheConfig) -> Iterator[Finding]:
    """Check whether the node's service that the settings name listens."""
    root = config.service
    if root is None:
        return
    try:
        with RuntimeDirectory(root) as directory:
            directory.connect(SOCKET, _SERVICE_SECONDS, socket.SOCK_SEQPACKET).close()
    except OSError as error:
        text = f"no service answers in {root} ({error})"
        yield Finding("service", Level.PROBLEM, text, f"start it first: flexkv serve {root}")
        return
    yield Finding("service", Level.OK, f"a service listens in {root}")


def check_trace_file(config: CacheConfig) -> Iterator[Finding]:
    """Check whether requests can be recorded to the file of `trace`, which is not created."""
    if config.trace is None:
        return
    try:
        exists = check_trace(config.trace)
    except BlockingIOError as error:
        text = f"{config.trace}: {error.strerror}"
        yield Finding("trace", Level.ADVICE, text, "name a file of its own for each engine")
        return
    except OSError as error:
        change = "name a new file in a directory that exists, or a recording of this user alone"
        text = f"cannot record to {config.trace}: {error.strerror or error}"
        yield Finding("trace", Level.PROBLEM, text, change)
        return
    text = "a recording to add to" if exists else "does not exist: an engine creates it"
    yield Finding("trace", Level.OK, f"{config.trace} {text}")


def check_control(config: CacheConfig) -> Iterator[Finding]:
    """Say where operators ask; `local_http` checks the token. Whether the port is free shows at the
    start."""
    if config.control_port is None:
        return
    text = f"port {config.control_port}, its token is in {config.control_token_file}"
    yield Finding("control", Level.OK, text)


def _huge_pages(wanted: int | None, pool: int) -> Finding:
    text = f"{size(pool)} free in the pool of 2 MiB pages"
    if wanted is not None and 0 < pool < wanted:
        count = -(-wanted // (2 << 20))
        change = f"the pool is too small and stays unused: sysctl vm.nr_hugepages={count}, or 0"
        return Finding("huge pages", Level.ADVICE, text, change)
    if not pool:
        text += "; optional: a pool as large as cpu_cache_gb makes starts faster"
    return Finding("huge pages", Level.OK, text)
