# SPDX-License-Identifier: Apache-2.0
"""The memory file behind an arena: its kinds of pages, and how they are filled.

2 MiB pages are best. An arena of 2 GiB is filled in 0.07 s instead of 0.6 to 1.1 s (Xeon, 2 cores,
virtual; the processor copies equally fast with both). A GPU's driver has 512 times fewer pages to
pin. FlexKV takes them from the kernel's pool of huge pages if it has enough free ones. Otherwise
FlexKV asks the kernel for huge pages of ordinary memory, which most systems forbid for shared
memory. If the kernel refuses, pages have 4 KiB.

No setting chooses the kind. The pool holds only pages that an administrator has put there. FlexKV
uses it if the whole arena fits, as PostgreSQL does by default (`huge_pages = try`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from flexkv.system.numa import processors_of
from flexkv.types.errors import ArenaError

HUGE_PAGE = 2 << 20
"""Bytes of a huge page. The size of every arena is a multiple of it, even with smaller pages."""

_POPULATE_CHUNK = 16 << 20
"""Bytes that one thread requests from the kernel at a time. A call costs some microseconds, little
against filling this much. An arena has many such pieces, which spread it over NUMA nodes."""

_CHUNKS_AT_A_TIME = 16
"""Pieces that are requested at a time where memory is waited for: 256 MiB."""

_MADV_POPULATE_WRITE = 23
_MADV_HUGEPAGE = 14
"""linux/mman.h; Python 3.11's mmap module names neither."""


class Pages(Enum):
    """The source of the memory. The value is the flag for memfd_create(2)."""

    POOL = os.MFD_HUGETLB | os.MFD_HUGE_2MB
    ORDINARY = 0


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""With these seals, no process can resize the file or add a seal against writes."""


def create_file(size: int, pages: Pages) -> int:
    """Create an anonymous memory file of a multiple of `HUGE_PAGE` bytes. It is sealed: if a
    process could shrink it, accesses to the mappings of others would end them with SIGBUS. The
    kernel reserves pages of the pool when the file is mapped. The caller closes the descriptor.
    Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | pages.value
    fd = os.memfd_create("flexkv-arena", flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_seals(fd: int) -> None:
    """Refuse a file that another process could shrink, by an ArenaError. An access behind its new
    end would end this process with SIGBUS. Raises OSError if the seals cannot be read."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ArenaError("the arena is not a memory file; allowed: one of memfd_create") from None
    if seals & _SEALS != _SEALS:
        raise ArenaError(
            f"the arena's memory file has the seals {seals:#x}; allowed: {_SEALS:#x}, so that "
            f"no process can resize it"
        )


def populate(  # noqa: PLR0917 - one mapping and how to fill it
    fd: int,
    address: int,
    size: int,
    threads: int,
    nodes: Iterable[int] = (),
    filled: Callable[[int], None] | None = None,
    wait: Callable[[int], None] | None = None,
) -> None:
    """Allocate the memory of a file that is mapped whole at `address`, and fill this process's page
    table, so that copies cause no page faults. Raises OSError, and causes no SIGBUS, if the kernel
    has too little memory.

    Args:
        nodes: NUMA nodes that give memory in equal parts. Memory that is already allocated stays
            where it is. If empty, memory comes from the nodes on which the threads run.
        filled: called in this thread with numbers of bytes that have been filled since.
        wait: called in this thread before the kernel is asked for so many bytes, at most 256 MiB,
            when all before are filled. None: all bytes are asked for at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def advise(start: int, length: int, advice: int) -> int:
        where = ctypes.c_void_p(address + start)
        return (
            0 if libc.madvise(where, ctypes.c_size_t(length), advice) == 0 else ctypes.get_errno()
        )

    def fill(start: int, length: int) -> None:
        code = advise(start, length, _MADV_POPULATE_WRITE)
        if code == errno.EINVAL:  # Linux before 5.14
            os.posix_fallocate(fd, start, length)
        elif code:
            raise OSError(code, os.strerror(code))

    # The result is ignored: if the kernel has no huge pages for shared memory, it uses small ones.
    advise(0, size, _MADV_HUGEPAGE)
    chunks = [(s, min(_POPULATE_CHUNK, size - s)) for s in range(0, size, _POPULATE_CHUNK)]
    pools = _pools(threads, sorted(nodes))
    try:
        for part in [chunks] if wait is None else _parts(chunks):
            if wait is not None:
                wait(sum(length for _, length in part))
            futures = [pools[i % len(pools)].submit(fill, *c) for i, c in enumerate(part)]
            for future, (_, length) in zip(futures, part, strict=True):
                future.result()
                if filled is not None:
                    filled(length)
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _parts(chunks: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    return [chunks[i : i + _CHUNKS_AT_A_TIME] for i in range(0, len(chunks), _CHUNKS_AT_A_TIME)]


def _pools(threads: int, nodes: Sequence[int]) -> list[ThreadPoolExecutor]:
    """Make a pool of threads for each node, whose threads run on the node's processors. Without
    nodes, make one pool."""
    make = functools.partial(ThreadPoolExecutor, thread_name_prefix="flexkv-populate")
    if not nodes:
        return [make(threads)]
    share = max(1, threads // len(nodes))
    return [make(share, initializer=_run_near, initargs=(node,)) for node in nodes]


def _run_near(node: int) -> None:
    """Move this thread to the processors of `node` that the process may use, if there are any."""
    processors = processors_of(node)
    if processors:
        with contextlib.suppress(OSError):  # `Arena.create` warns if memory lies on other nodes
            os.sched_setaffinity(0, processors)
