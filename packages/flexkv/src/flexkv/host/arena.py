# SPDX-License-Identifier: Apache-2.0
"""The arena: shared host memory for all processes of an engine, cut into slots.

The arena is an anonymous memory file (memfd), whose descriptor processes receive over a socket. It
has no name that a crash could leave behind. The kernel frees it when the last process has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flexkv.host.board import CompletionBoard, board_bytes
from flexkv.host.memory_file import HUGE_PAGE, Pages, check_seals, create_file, populate
from flexkv.layout import SLOT_ALIGNMENT, BlockFormat
from flexkv.settings import GIB, SETTINGS
from flexkv.system.available import Promise, available_memory, free_huge_pages
from flexkv.system.forks import close_in_children
from flexkv.system.numa import bytes_by_node
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

DEFAULT_CACHE_GB = 16.0
"""The least default of `cpu_cache_gb`, in GiB. If half of the available memory is less, that is
taken."""

_POOLS = 2
"""By default host memory is as many times as large as the engine's own KV cache. Host memory gives
no hit for blocks that are in both. On Mooncake's conversation trace, with 5,000 blocks in the
engine and lru, 11.2 % of all blocks are hits without host memory and with 5,000 blocks of it, and
21.2 % with 10,000."""

_ELSEWHERE_SHARE = 0.1
"""If more than this part of the arena is not on the wanted NUMA nodes, a warning is logged."""

_LEFT_FREE = 2 << 30
"""Bytes that stay available to other programs while an arena waits for memory: more than eight
starting engines take at a time."""

_GROWTH_SECONDS = 60.0
"""Time limit for growth of the available memory. A balloon gives memory back within seconds."""

_GROWTH_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """The description of an arena that every process needs to use it.

    Attributes:
        boards: the number of completion boards, one for each engine that uses the arena.
        board: the number of this engine's board.
        grows: for the process that creates the arena: whether the memory may become available while
            it is filled.
    """

    format: BlockFormat
    num_slots: int
    boards: int = 1
    board: int = 0
    grows: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        parts = self.format
        sizes = (self.num_slots, parts.engine_blocks, parts.replicas, *parts.shard_bytes)
        if min(sizes) < 0 or not 0 <= self.board < self.boards:
            raise ValueError(f"{self} is no arena")

    @property
    def ranks(self) -> int:
        """The number of ranks of the engine."""
        return self.format.ranks

    @property
    def slots_offset(self) -> int:
        """The place of slot 0, after all boards: bytes from the start of the memory."""
        return -(-self.boards * board_bytes(self.ranks) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.format.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the memory file, a multiple of `HUGE_PAGE`."""
        return -(-(self.slots_offset + self.slots_bytes) // HUGE_PAGE) * HUGE_PAGE


class Reservation:
    """Shows processes that start together what memory each of them is about to take. This one is
    that of a process that no other sees; for others see `flexkv.session.reservation`."""

    @contextlib.contextmanager
    def turn(self) -> Iterator[Sequence[Promise]]:
        """Let no other process plan during the block, which gets the promises of all others."""
        yield ()

    def promise(self, size: int) -> None:
        """Within a turn: this process is about to take `size` bytes."""

    def filled(self, size: int) -> None:
        """This process has taken `size` bytes of its promise."""


def plan_arena(
    block_format: BlockFormat,
    cpu_cache_gb: float | None,
    promised: Sequence[Promise] = (),
    *,
    pool_blocks: int = 0,
    engines: int = 1,
    pages: int = 0,
    grows: bool = False,
) -> ArenaSpec:
    """Size the arena. Raises ArenaError if the memory is not available, or too small for a block.

    Args:
        cpu_cache_gb: the setting, in GiB; None for the default.
        promised: memory that other processes are about to take.
        pool_blocks: engine blocks of the engine's own KV cache on each rank; 0 if it has none. If
            host memory is no larger, a warning is logged.
        engines: engines of a server, of which each is about to take an arena of the default size.
        pages: engine blocks of a program without an engine, which decide the default; else 0.
    """
    # Available memory does not include the pool of huge pages. The whole arena must fit into the
    # pool, with the board and the padding at its end.
    pool = free_huge_pages() - ArenaSpec(block_format, 0).total_bytes - HUGE_PAGE
    available = max(available_memory(promised=promised), pool)
    pool_slots = pool_blocks // block_format.engine_blocks
    pool_bytes = pool_slots * block_format.slot_bytes
    if cpu_cache_gb is None:
        least = DEFAULT_CACHE_GB * GIB / engines
        usual = max(least, _POOLS * pool_bytes)
        if pages:
            usual = _POOLS * pages / block_format.engine_blocks * block_format.slot_bytes
        wanted = int(min(usual, available / 2 / engines))
        given, asked = "", f"is not set, and its default has {wanted} bytes now"
    else:
        wanted = int(cpu_cache_gb * GIB)
        given = SETTINGS["cpu_cache_gb"].written(cpu_cache_gb)
        asked = f"is {given} GiB"
    allowed = f"at most {available / GIB:.2f} GiB, which are available on this machine now"
    if promised:
        waiting = sum(each.size for each in promised) / GIB
        allowed += f" beside {waiting:.2f} GiB that starting engines of this user still take"
    if wanted > available and not grows:
        raise ArenaError(
            f"cpu_cache_gb is {given} GiB; allowed: {allowed}, or memory_grows if the machine gets "
            f"more memory while it uses what it has"
        )
    spec = ArenaSpec(block_format, wanted // block_format.slot_bytes, grows=wanted > available)
    if spec.num_slots == 0:
        raise ArenaError(
            f"cpu_cache_gb {asked}, less than one block of "
            f"{block_format.slot_bytes} bytes; allowed: room for at least one block, {allowed}"
        )
    if spec.num_slots <= pool_slots:
        logger.warning(
            "host memory has %.2f GiB for blocks, and the engine's own KV cache %.2f GiB: blocks "
            "in host memory may be in the engine's cache as well, and then give no hits; set "
            "cpu_cache_gb to more than %.2f; %.2f GiB are available",
            spec.slots_bytes / GIB,
            pool_bytes / GIB,
            pool_bytes / GIB,
            available / GIB,
        )
    return spec


class Arena:
    """A mapping of the shared memory in this process.

    Owns its mapping and its file descriptor until `close`. Addresses are valid until then. The
    memory itself lives as long as any process has it mapped.
    """

    def __init__(self, fd: int, spec: ArenaSpec) -> None:
        """Map an existing arena. Owns `fd` from now on; closes it on failure. Raises ArenaError if
        `fd` is not an arena of this size, can be resized, or cannot be mapped."""
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
        # Computed once: writes to lower tiers ask for many slots.
        self._slots_offset, self._slot_bytes = spec.slots_offset, spec.format.slot_bytes
        self.board = self.board_of(spec.board)
        close_in_children(self)

    @classmethod
    def create(
        cls, spec: ArenaSpec, threads: int = 4, numa_nodes: frozenset[int] = frozenset()
    ) -> Arena:
        """Create an arena of known sizes that no other process waits for; see `create_planned`."""
        return cls.create_planned(lambda _: spec, threads, numa_nodes, Reservation())

    @classmethod
    def create_planned(
        cls,
        plan: Callable[[Sequence[Promise]], ArenaSpec],
        threads: int,
        numa_nodes: frozenset[int],
        reservation: Reservation,
    ) -> Arena:
        """Create the arena and allocate all of its memory. If memory is missing, this fails now,
        and not by SIGBUS later. Raises ArenaError.

        Args:
            plan: sizes the arena beside what other processes are about to take; may raise.
            numa_nodes: NUMA nodes of the GPUs of all ranks. The memory is spread over them evenly,
                in pieces of 16 MiB: a slot holds bytes of all ranks, all GPUs together read faster
                than one node's memory delivers, and an arena may be larger than a node's memory.
                If empty, any node gives memory.
            reservation: shows other processes what this one takes; borrowed.
        """
        spec: ArenaSpec | None = None
        pooled = True
        while True:
            with reservation.turn() as promised:
                spec = spec or plan(promised)
                # The kernel reserves pages of the pool at once, so others see that they are taken.
                arena = cls._in_pool(spec) if pooled else None
                pooled = arena is not None
                if arena is None:
                    arena = cls._in_ordinary_memory(spec, promised)
                    reservation.promise(spec.total_bytes)
            try:
                arena.populate(threads, numa_nodes, None if pooled else reservation.filled)
                break
            except ArenaError as error:
                arena.close()
                if not pooled:
                    raise
                _log_no_pool(error)
                pooled = False
        arena._warn_if_elsewhere(numa_nodes)
        return arena

    @classmethod
    def _in_pool(cls, spec: ArenaSpec) -> Arena | None:
        """Map memory of the kernel's pool of huge pages; None if the pool has too little."""
        if free_huge_pages() < spec.total_bytes:
            return None
        try:
            return cls._map_new(spec, Pages.POOL)
        except ArenaError as error:
            _log_no_pool(error)
            return None

    @classmethod
    def _in_ordinary_memory(cls, spec: ArenaSpec, promised: Sequence[Promise]) -> Arena:
        # plan_arena may have sized the arena for the pool. If FlexKV took more ordinary memory than
        # is available, the kernel would end this process or another.
        available = available_memory(promised=promised)
        if spec.grows:
            logger.warning(
                "the arena has %.2f GiB, and %.2f GiB are available: memory_grows is set, FlexKV "
                "takes memory as this machine gets it",
                spec.total_bytes / GIB,
                available / GIB,
            )
        elif spec.slots_bytes > available:
            raise ArenaError(
                f"cannot create an arena of {spec.total_bytes} bytes; allowed: at most "
                f"{available}, which are available on this machine now"
            )
        return cls._map_new(spec, Pages.ORDINARY)

    @classmethod
    def _map_new(cls, spec: ArenaSpec, pages: Pages) -> Arena:
        try:
            fd = create_file(spec.total_bytes, pages)
        except OSError as error:
            raise ArenaError(
                f"cannot create an arena of {spec.total_bytes} bytes: {error}"
            ) from None
        return cls(fd, spec)

    def populate(
        self,
        threads: int = 4,
        numa_nodes: frozenset[int] = frozenset(),
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Fill this process's page table, so that copies cause no page faults. For `numa_nodes` see
        `create_planned`; memory that is already allocated is not moved. `filled` is called with
        numbers of bytes that have been filled since. Raises ArenaError if the machine has too
        little memory."""
        size, wait = self.spec.total_bytes, _await_memory if self.spec.grows else None
        try:
            populate(self.fd, self.address, size, threads, numa_nodes, filled, wait)
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

    def board_of(self, number: int) -> CompletionBoard:
        """The board of one engine; its own has the number `spec.board`. The caller releases it
        before `close`."""
        size = board_bytes(self.spec.ranks)
        view = memoryview(self._map)[number * size : (number + 1) * size]
        return CompletionBoard(view, self.spec.ranks, self.address + number * size)

    def shard_offset(self, slot: int, rank: int) -> int:
        """The place of `rank`'s shard of `slot`, in bytes from `address`."""
        fmt = self.spec.format
        return (
            self.spec.slots_offset + slot * fmt.slot_bytes + fmt.shard_offsets[rank // fmt.replicas]
        )

    def slot_view(self, slot: int) -> memoryview:
        """A view of `slot`: all shards and the padding, `spec.format.slot_bytes` bytes, aligned to
        4 KiB. The caller releases the view before `close`."""
        start = self._slots_offset + slot * self._slot_bytes
        return memoryview(self._map)[start : start + self._slot_bytes]

    def leave_to_parent(self) -> None:
        """See `Owner.leave_to_parent`. The parent's arena is unchanged."""
        if self.fd < 0:
            return
        mine = os.fstat(self.fd)
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the listing itself
                if os.path.samestat(os.fstat(number), mine):
                    os.close(number)  # the mapping's object has a copy, too
        self.fd = -1
        # The child does not have the mapping. If Python freed the mapping's object there, it would
        # unmap whatever lies at that address by then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))

    def close(self) -> None:
        """Unmap the memory and close the descriptor. No copy may be under way in this process.
        Idempotent. Does nothing in a forked child, which has no mapping.

        If a view of a slot lives on, the memory is unmapped when the last one is gone."""
        if self.fd < 0:
            return
        self.board.release()
        os.close(self.fd)
        self.fd = -1
        del self._anchor
        try:
            self._map.close()
        except BufferError:
            logger.warning(
                "a view of the arena's %.1f GiB lives on; the memory is freed when it is gone",
                self.spec.total_bytes / GIB,
            )
        del self._map


def _await_memory(size: int) -> None:
    """Wait until this machine has `size` bytes beside those for other programs. Raises OSError if
    it has not, and has got none for a while."""
    most, deadline = 0, time.monotonic() + _GROWTH_SECONDS
    while (available := available_memory()) < size + _LEFT_FREE:
        if available > most:
            most, deadline = available, time.monotonic() + _GROWTH_SECONDS
        elif time.monotonic() > deadline:
            raise OSError(
                errno.ENOMEM,
                f"{available / GIB:.2f} GiB are available, and have not grown for "
                f"{_GROWTH_SECONDS:.0f} s (memory_grows is set); lower cpu_cache_gb",
            )
        time.sleep(_GROWTH_POLL_SECONDS)


def _log_no_pool(error: ArenaError) -> None:
    logger.info("the arena does not use the kernel's pool of huge pages: %s", error)
