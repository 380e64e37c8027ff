# SPDX-License-Identifier: Apache-2.0
"""Host memory as the device of pages."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.host.arena import Arena
from flexkv.layout import PlacedPlane
from flexkv.types.mover import Mover
from flexkv_kernels.cpu_mover import CpuMover


class HostMemory:
    """Pages in the memory of this machine's processors. A `Device` of the adapters."""

    numa_node: int | None = None

    def make_mover(
        self,
        planes: Sequence[PlacedPlane],
        stored: range,
        num_blocks: int,
        arena: Arena,
        threads: int,
    ) -> Mover:
        """See `Device.make_mover`. It also raises ValueError if ``threads`` is not 1 to 1024."""
        size = arena.spec.total_bytes
        return CpuMover(planes, num_blocks, arena.address, size, threads, store=stored)

    def work_so_far(self) -> int:
        """0, for no work: bytes that a thread has written are in place."""
        return 0
