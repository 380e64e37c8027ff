# SPDX-License-Identifier: Apache-2.0
"""The arena: one piece of shared host memory, cut into slots, for all processes of an engine.

It is an anonymous memory file (memfd), handed from process to process over a socket. So it has
no name that could be left behind: the kernel frees it with its last process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from dataclasses import dataclass

from flexkv.config import GIB
from flexkv.errors import ArenaError
from flexkv.forks import close_in_children
from flexkv.host.available import available_memory, free_huge_pages
from flexkv.host.board import CompletionBoard, board_bytes
from flexkv.host.memory_file import HUGE_PAGE, Pages, check_seals, create_file, populate
from flexkv.host.numa import bytes_by_node
from flexkv.layout import SLOT_ALIGNMENT, BlockFormat

logger = logging.getLogger(__name__)

DEFAULT_CACHE_GB = 16.0
"""Default of `cpu_cache_gb`; half of what is available where that is less."""

_ELSEWHERE_SHARE = 0.1
"""More of the arena than this off the wanted NUMA nodes is worth a warning. Not tuned."""


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """What a process must know to use an arena that another one created.

    Attributes:
        format: how blocks lie in slots.
        num_slots: slots in the arena.
    """

    format: BlockFormat
    num_slots: int

    @property
    def ranks(self) -> int:
        return self.format.ranks

    @property
    def slots_offset(self) -> int:
        """Where slot 0 starts: behind the completion board, in bytes."""
        return -(-board_bytes(self.ranks) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.format.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the memory file, a multiple of `HUGE_PAGE`."""
        return -(-(self.slots_offset + self.slots_bytes) // HUGE_PAGE) * HUGE_PAGE


def plan_arena(block_format: BlockFormat, cpu_cache_gb: float | None) -> ArenaSpec:
    """Size the arena for a setting of `cpu_cache_gb` (GiB; None takes the default).

    Raises:
        ArenaError: the memory is not available, or too small for a single block.
    """
    # Pages of the pool of huge pages do not count as available memory. The whole arena must fit
    # into the pool, with its parts apart from slots.
    pool = free_huge_pages() - ArenaSpec(block_format, 0).total_bytes - HUGE_PAGE
    available = max(available_memory(), pool)
    if cpu_cache_gb is None:
        wanted = int(min(DEFAULT_CACHE_GB * GIB, available / 2))
    else:
        wanted = int(cpu_cache_gb * GIB)
    allowed = f"at most {available / GIB:.2f} GiB, what is available on this machine now"
    if wanted > available:
        raise ArenaError(f"cpu_cache_gb is {wanted / GIB:g} GiB; allowed: {allowed}")
    spec = ArenaSpec(block_format, wanted // block_format.slot_bytes)
    if spec.num_slots == 0:
        raise ArenaError(
            f"cpu_cache_gb is {wanted / GIB:g} GiB, less than one block of "
            f"{block_format.slot_bytes} bytes; allowed: room for at least one block, {allowed}"
        )
    return spec


class Arena:
    """A mapping of the shared memory in this process.

    Owns its mapping and its file descriptor; `close` gives both back. Addresses are valid until
    then. The memory itself lives as long as any process has it mapped.

    Attributes:
        spec: sizes, the same in all processes.
        address: where the mapping starts in this process.
        board: the completion board at the start of the memory.
    """

    def __init__(self, fd: int, spec: ArenaSpec) -> None:
        """Map an existing arena. Takes over `fd`, even on failure.

        Raises:
            ArenaError: `fd` is not an arena of this size, can be resized, or cannot be mapped.
        """
        self.spec = spec
        self.fd = fd
        try:
            size = os.fstat(fd).st_size
            if size != spec.total_bytes:
                raise ArenaError(f"arena has {size} bytes; allowed: {spec.total_bytes}")
            check_seals(fd)
            self._map = mmap.mmap(fd, spec.total_bytes)
            self._map.madvise(mmap.MADV_DONTFORK)
        except OSError as error:
            os.close(fd)
            raise ArenaError(f"cannot map the arena of {spec.total_bytes} bytes: {error}") from None
        except ArenaError:
            os.close(fd)
            raise
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        view = memoryview(self._map)[: board_bytes(spec.ranks)]
        self.board = CompletionBoard(view, spec.ranks, self.address)
        close_in_children(self)

    @classmethod
    def create(
        cls, spec: ArenaSpec, threads: int = 4, numa_nodes: frozenset[int] = frozenset()
    ) -> Arena:
        """Create the memory and fill it, so that missing memory fails now and not by SIGBUS later.

        Args:
            spec: sizes.
            threads: threads that fault the pages in.
            numa_nodes: nodes of the GPUs of all ranks. The memory is spread over them evenly, in
                large pieces: any rank's bytes may lie in any slot, all the GPUs together read
                faster than one node's memory can be read, and a node is no bound for the arena.
                Empty: nodes do not matter, or are not known.

        Raises:
            ArenaError: the memory cannot be had.
        """
        if free_huge_pages() >= spec.total_bytes:
            try:
                return cls._create(spec, Pages.POOL, threads, numa_nodes)
            except ArenaError as error:
                logger.info("the arena does not use the kernel's pool of huge pages: %s", error)
        # The size may have been chosen for the pool: see plan_arena. Taking more ordinary memory
        # than is available would end this process or another.
        available = available_memory()
        if spec.slots_bytes > available:
            raise ArenaError(
                f"cannot create an arena of {spec.total_bytes} bytes; allowed: at most "
                f"{available}, what is available on this machine now"
            )
        return cls._create(spec, Pages.ORDINARY, threads, numa_nodes)

    @classmethod
    def _create(
        cls, spec: ArenaSpec, pages: Pages, threads: int, numa_nodes: frozenset[int]
    ) -> Arena:
        try:
            fd = create_file(spec.total_bytes, pages)
        except OSError as error:
            raise ArenaError(
                f"cannot create an arena of {spec.total_bytes} bytes: {error}"
            ) from None
        arena = cls(fd, spec)
        try:
            arena.populate(threads, numa_nodes)
        except ArenaError:
            arena.close()
            raise
        arena._warn_if_elsewhere(numa_nodes)
        return arena

    def populate(self, threads: int = 4, numa_nodes: frozenset[int] = frozenset()) -> None:
        """Fault every page into this process's page table, so that no copy has to.

        Args:
            threads: threads that do it.
            numa_nodes: see `create`; of memory that is there already nothing is moved.

        Raises:
            ArenaError: the memory cannot be had.
        """
        try:
            populate(self.fd, self.address, self.spec.total_bytes, threads, numa_nodes)
        except OSError as error:
            raise ArenaError(
                f"cannot fill the arena of {self.spec.total_bytes} bytes: {error}"
            ) from None

    def _warn_if_elsewhere(self, numa_nodes: frozenset[int]) -> None:
        if not numa_nodes:
            return
        placed = bytes_by_node(self.address)
        elsewhere = sum(size for node, size in placed.items() if node not in numa_nodes)
        if elsewhere > _ELSEWHERE_SHARE * self.spec.total_bytes:
            logger.warning(
                "%.1f of the arena's %.1f GiB are not on NUMA nodes %s, the nodes of the GPUs; "
                "these nodes have no free memory, or this process is bound to other nodes. Copies "
                "between nodes can be slower",
                elsewhere / GIB,
                self.spec.total_bytes / GIB,
                sorted(numa_nodes),
            )

    def shard_offset(self, slot: int, rank: int) -> int:
        """Where `rank`'s shard of `slot` starts, in bytes from `address`."""
        fmt = self.spec.format
        return (
            self.spec.slots_offset + slot * fmt.slot_bytes + fmt.shard_offsets[rank // fmt.replicas]
        )

    def slot_view(self, slot: int) -> memoryview:
        """The bytes of `slot`, all shards, padding included; 4 KiB-aligned in memory, and as many
        as `spec.format.slot_bytes`. To be gone before `close`."""
        start = self.spec.slots_offset + slot * self.spec.format.slot_bytes
        return memoryview(self._map)[start : start + self.spec.format.slot_bytes]

    def leave_to_parent(self) -> None:
        if self.fd < 0:
            return
        mine = os.fstat(self.fd)
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the listing itself
                if os.path.samestat(os.fstat(number), mine):
                    os.close(number)  # the mapping's object has a copy, too
        self.fd = -1
        # The mapping is not in the child. Were its object freed there, it would unmap whatever is
        # at the address by then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))

    def close(self) -> None:
        """Unmap and close. Idempotent; does nothing in a forked child, which has no mapping. No
        copy may be under way in this process."""
        if self.fd < 0:
            return
        self.board.release()
        del self._anchor
        self._map.close()
        os.close(self.fd)
        self.fd = -1
