# SPDX-License-Identifier: Apache-2.0
"""The arena: one piece of shared host memory, cut into slots, for all processes of an engine.

It is an anonymous memory file (memfd), handed from process to process over a socket. So it has
no name that could be left behind: the kernel frees it with its last process, however that ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flexkv.config import GIB
from flexkv.errors import ArenaError
from flexkv.host_memory import available_memory
from flexkv.layout import SLOT_ALIGNMENT, BlockFormat
from flexkv.transfer.board import CompletionBoard, board_bytes

DEFAULT_CACHE_GB = 16.0
"""Default of `cpu_cache_gb`; half of what is available where that is less."""

_POPULATE_CHUNK = 64 << 20
"""Bytes that one thread asks the kernel for at a time; large against the call's cost of some
microseconds, small against the threads' shares of an arena of a few GiB."""

_MADV_POPULATE_WRITE = 23
_MADV_HUGEPAGE = 14
"""linux/mman.h; Python 3.11's mmap module names neither."""


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
        return len(self.format.shard_bytes)

    @property
    def slots_offset(self) -> int:
        """Where slot 0 starts: behind the completion board, in bytes."""
        return -(-board_bytes(self.ranks) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def total_bytes(self) -> int:
        return self.slots_offset + self.num_slots * self.format.slot_bytes


def plan_arena(block_format: BlockFormat, cpu_cache_gb: float | None) -> ArenaSpec:
    """Size the arena for a setting of `cpu_cache_gb` (GiB; None takes the default).

    Raises:
        ArenaError: the memory is not there, or too small for a single block.
    """
    available = available_memory()
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
        """Map an existing arena. Takes over `fd`, also when it fails.

        Raises:
            ArenaError: `fd` is not an arena of this size, or cannot be mapped.
        """
        self.spec = spec
        self.fd = fd
        try:
            size = os.fstat(fd).st_size
            if size != spec.total_bytes:
                raise ArenaError(f"arena has {size} bytes; allowed: {spec.total_bytes}")
            self._map = mmap.mmap(fd, spec.total_bytes)
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

    @classmethod
    def create(cls, spec: ArenaSpec, threads: int = 4) -> Arena:
        """Create the memory and fill it in, so that a lack of it shows now and not as a SIGBUS.

        Args:
            spec: sizes.
            threads: threads that fault the pages in.

        Raises:
            ArenaError: the memory cannot be had.
        """
        try:
            fd = os.memfd_create("flexkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, spec.total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            raise ArenaError(
                f"cannot create an arena of {spec.total_bytes} bytes: {error}"
            ) from None
        arena = cls(fd, spec)
        try:
            arena.populate(threads)
        except ArenaError:
            arena.close()
            raise
        return arena

    def populate(self, threads: int = 4) -> None:
        """Fault every page into this process's page table, so that no copy has to.

        Raises:
            ArenaError: the memory cannot be had.
        """
        libc = ctypes.CDLL(None, use_errno=True)

        def advise(start: int, length: int, advice: int) -> int:
            address = ctypes.c_void_p(self.address + start)
            if libc.madvise(address, ctypes.c_size_t(length), advice) == 0:
                return 0
            return ctypes.get_errno()

        # Refused where the kernel has no huge pages for shared memory: small ones do as well.
        advise(0, self.spec.total_bytes, _MADV_HUGEPAGE)
        with ThreadPoolExecutor(threads, thread_name_prefix="flexkv-populate") as pool:
            chunks = self._chunks()
            codes = set(pool.map(lambda c: advise(c[0], c[1], _MADV_POPULATE_WRITE), chunks)) - {0}
        if codes == {errno.EINVAL}:
            self._allocate()  # Linux before 5.14
        elif codes:
            code = codes.pop()
            raise ArenaError(
                f"cannot fill the arena of {self.spec.total_bytes} bytes: {os.strerror(code)}"
            )

    def _chunks(self) -> Iterator[tuple[int, int]]:
        total = self.spec.total_bytes
        for start in range(0, total, _POPULATE_CHUNK):
            yield start, min(_POPULATE_CHUNK, total - start)

    def _allocate(self) -> None:
        try:
            os.posix_fallocate(self.fd, 0, self.spec.total_bytes)
        except OSError as error:
            raise ArenaError(
                f"cannot fill the arena of {self.spec.total_bytes} bytes: {error}"
            ) from None

    def shard_offset(self, slot: int, rank: int) -> int:
        """Where `rank`'s shard of `slot` starts, in bytes from `address`."""
        fmt = self.spec.format
        return self.spec.slots_offset + slot * fmt.slot_bytes + fmt.shard_offsets[rank]

    def close(self) -> None:
        """Unmap and close. Idempotent. No copy may be under way in this process."""
        if self._map.closed:
            return
        self.board.release()
        del self._anchor
        self._map.close()
        os.close(self.fd)
