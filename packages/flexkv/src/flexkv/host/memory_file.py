# SPDX-License-Identifier: Apache-2.0
"""The memory file behind an arena: its kinds of pages, and how they are filled.

2 MiB pages are best: an arena of 2 GiB is filled in 0.07 s instead of 0.6 to 1.1 s (Xeon, 2 cores,
virtual; copies by its processor are as fast either way), and a GPU's driver has 512 times fewer
pages to pin. They come from the kernel's pool of huge pages where it has enough free ones; else the
kernel is asked to make them of ordinary memory, which most systems forbid for shared memory; else
pages are of 4 KiB.

No setting chooses the kind. The pool holds only pages that an administrator has put there, and
FlexKV uses it if all of the arena fits (as PostgreSQL's default, `huge_pages = try`, does).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from flexkv.errors import ArenaError
from flexkv.host.numa import processors_of

HUGE_PAGE = 2 << 20
"""Bytes of a huge page; arenas are multiples of it, whatever their pages are."""

_POPULATE_CHUNK = 16 << 20
"""Bytes that one thread asks the kernel for at a time; large against the call's cost of some
microseconds, small against an arena, which is spread over NUMA nodes in these pieces."""

_MADV_POPULATE_WRITE = 23
_MADV_HUGEPAGE = 14
"""linux/mman.h; Python 3.11's mmap module names neither."""


class Pages(Enum):
    """The source of the memory; the value is the flag for `memfd_create`."""

    POOL = os.MFD_HUGETLB | os.MFD_HUGE_2MB
    ORDINARY = 0


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No process can resize the file, nor forbid others to write to it."""


def create_file(size: int, pages: Pages) -> int:
    """An anonymous memory file of `size` bytes, sealed so that no process can resize it under the
    mapping of another, which would end that one with SIGBUS. The caller owns the descriptor.

    Args:
        size: a multiple of `HUGE_PAGE`.
        pages: what it is made of. Those of the pool are reserved when the file is mapped.

    Raises:
        OSError: the kernel refuses.
    """
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
    """Refuse a file that `create_file` did not make: an access to memory that another process has
    cut off would end this one with SIGBUS.

    Raises:
        ArenaError: the file is not a memory file, or can be resized.
        OSError: the descriptor cannot be read.
    """
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


def populate(fd: int, address: int, size: int, threads: int, nodes: Iterable[int] = ()) -> None:
    """Fill in a mapping's memory and this process's page table, so that no copy has to.

    Args:
        fd: the file.
        address: where all of it is mapped in this process.
        size: bytes.
        threads: threads to use.
        nodes: NUMA nodes to take memory from that is not there yet, in equal parts; none: the
            nodes on which the threads happen to run.

    Raises:
        OSError: the memory cannot be had. No access causes SIGBUS instead.
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

    # Refused where the kernel has no huge pages for shared memory: small ones do as well.
    advise(0, size, _MADV_HUGEPAGE)
    chunks = ((s, min(_POPULATE_CHUNK, size - s)) for s in range(0, size, _POPULATE_CHUNK))
    pools = _pools(threads, sorted(nodes))
    try:
        for future in [pools[i % len(pools)].submit(fill, *c) for i, c in enumerate(chunks)]:
            future.result()
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _pools(threads: int, nodes: Sequence[int]) -> list[ThreadPoolExecutor]:
    """Threads, those of one pool on the processors of one node."""
    make = functools.partial(ThreadPoolExecutor, thread_name_prefix="flexkv-populate")
    if not nodes:
        return [make(threads)]
    share = max(1, threads // len(nodes))
    return [make(share, initializer=_run_near, initargs=(node,)) for node in nodes]


def _run_near(node: int) -> None:
    """Move this thread to processors of `node`, if there are any that the process may use."""
    processors = processors_of(node)
    if processors:
        with contextlib.suppress(OSError):  # `Arena.create` tells where the memory lies instead
            os.sched_setaffinity(0, processors)
