# SPDX-License-Identifier: Apache-2.0
"""The device that the engine's pages are on: what copies them, and what copies wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexkv.errors import LayoutError
from flexkv.host.arena import Arena
from flexkv.host.numa import node_of_device
from flexkv.layout import PlacedPlane
from flexkv.mover import Mover
from flexkv_kernels import (
    CpuMover,
    CudaMover,
    CudaOptions,
    calibrated_crossovers,
    cuda_device,
    cuda_unavailable,
)

_LEGACY_STREAM = 1
"""CU_STREAM_LEGACY of cuda.h: CUDA's default stream, whose own handle is 0, which to a mover means
that there is nothing to wait for."""


def device_of(kv_caches: Mapping[str, torch.Tensor]) -> torch.device:
    """The one device of all tensors.

    Raises:
        LayoutError: there are several, or one that nothing here copies from, or not only tensors.
    """
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(
                f"KV cache {name!r} is a {type(tensor).__name__}; allowed: one tensor per layer"
            )
    devices = {tensor.device: name for name, tensor in kv_caches.items()}
    if len(devices) > 1:
        named = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise LayoutError(f"KV caches are on several devices ({named}); allowed: one")
    (device,) = devices or [torch.device("cpu")]
    reason = None
    if device.type == "cuda":
        reason = cuda_unavailable()
    elif device.type != "cpu":
        reason = "flexkv-kernels copy to and from host memory and CUDA devices"
    if reason is not None:
        raise LayoutError(
            f"KV cache {devices[device]!r} is on device {device}; allowed: cpu ({reason})"
        )
    return device


def make_mover(  # noqa: PLR0917 - called in one place
    device: torch.device,
    planes: Sequence[PlacedPlane],
    stored: range,
    num_blocks: int,
    arena: Arena,
    threads: int,
) -> Mover:
    """What copies between the pages of `device` and the arena; see the movers of flexkv-kernels.
    On a GPU of a kind that is new here, its copies are first checked and measured, which takes some
    tenths of a second.

    Raises:
        ValueError: it refuses them.
    """
    size = arena.spec.total_bytes
    if device.type == "cuda":
        number = _number_of(device)
        options = CudaOptions(crossovers=calibrated_crossovers(number))
        return CudaMover(planes, num_blocks, arena.address, size, number, options, store=stored)
    return CpuMover(planes, num_blocks, arena.address, size, threads, store=stored)


def numa_node_of(device: torch.device) -> int | None:
    """The NUMA node that a GPU is attached to; None for others, or if it is not known."""
    if device.type != "cuda":
        return None
    return node_of_device(cuda_device(_number_of(device)).pci_bus_id)


def work_so_far(device: torch.device) -> int:
    """What a copy submitted now must wait for, as `Mover.submit` takes it: on a GPU, the work that
    this thread has given to the current stream."""
    if device.type != "cuda":
        return 0
    return torch.cuda.current_stream(device).cuda_stream or _LEGACY_STREAM


def _number_of(device: torch.device) -> int:
    return int(torch.cuda.current_device()) if device.index is None else device.index
