# SPDX-License-Identifier: Apache-2.0
"""The device of torch's tensors: it makes their mover, and names the work that copies follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from flexkv.host.arena import Arena
from flexkv.layout import PlacedPlane
from flexkv.system.numa import node_of_device
from flexkv.types.errors import LayoutError
from flexkv.types.mover import Mover
from flexkv_kernels.cuda_calibration import calibrated
from flexkv_kernels.cuda_device import cuda_device, cuda_unavailable
from flexkv_kernels.cuda_mover import CudaMover
from flexkv_kernels.cuda_options import CudaMode
from flexkv_kernels.cuda_scratch import HostKind
from flexkv_kernels.host_memory import HostMemory

logger = logging.getLogger("flexkv.cuda")

_LEGACY_STREAM = 1
"""CU_STREAM_LEGACY of cuda.h: CUDA's default stream. Its own handle is 0, which a mover takes as no
work to wait for."""


class CudaMemory:
    """Pages on a CUDA device of torch. A `Device` of the adapters. `device`: the device, as torch
    names it. Without a number, torch's current device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number = torch.cuda.current_device() if device.index is None else device.index

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that the GPU is attached to; None if it is unknown. Raises ValueError if
        the device cannot be used."""
        return node_of_device(cuda_device(self._number).pci_bus_id)

    def make_mover(
        self,
        planes: Sequence[PlacedPlane],
        stored: range,
        num_blocks: int,
        arena: Arena,
        threads: int,
    ) -> Mover:
        """See `Device.make_mover`. ``threads`` is not used. For a GPU or a layout that the user's
        cache folder does not have, copies are first checked and measured, which takes one
        to three seconds; see `calibrated`."""
        size = arena.spec.total_bytes
        found = calibrated(self._number, planes, stored, kind=HostKind.of(arena))
        options = found.options()
        mover = CudaMover(
            planes, num_blocks, arena.address, size, self._number, options, store=stored
        )
        uses_ring = any(choice.mode is CudaMode.STAGED for choice in options.choices)
        if uses_ring and mover.ring_bytes < options.ring_bytes:
            _report_short_memory(self._number, mover.ring_bytes, options.ring_bytes)
        return mover

    def work_so_far(self) -> int:
        """The handle of this thread's current stream, for the work in it."""
        return torch.cuda.current_stream(self._device).cuda_stream or _LEGACY_STREAM


def _report_short_memory(device: int, ring_bytes: int, wanted: int) -> None:
    logger.error(
        "CUDA device %d has memory for a copy ring of %d KiB each way, and not for the %d KiB that "
        "copies were measured with: copies are slower. Leave the GPU %d MiB more, by a lower "
        "gpu_memory_utilization or mem_fraction_static.",
        device,
        ring_bytes >> 10,
        wanted >> 10,
        2 * wanted >> 20,
    )


def device_of(kv_caches: Mapping[str, torch.Tensor]) -> HostMemory | CudaMemory:
    """Find the one device of all tensors. Without tensors, it is host memory. Raises LayoutError if
    there are several devices, or one that no mover copies from, or a value is not a tensor.
    `kv_caches`: the tensors, by layer; borrowed for the call."""
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
    return CudaMemory(device) if device.type == "cuda" else HostMemory()
