# SPDX-License-Identifier: Apache-2.0
"""What arenas are made of, and where: on this machine's kernel, not on a model of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from resident import resident

from flexkv import ArenaError
from flexkv.host import arena
from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.host.memory_file import HUGE_PAGE, Pages, create_file, populate
from flexkv.layout import BlockFormat
from flexkv.system.available import free_huge_pages
from flexkv.system.numa import bytes_by_node, processors_of

# The kernel's pool of huge pages is one for the machine: any other arena would take its pages.
pytestmark = pytest.mark.alone

FORMAT = BlockFormat(1, (1 << 20,))
SPEC = ArenaSpec(FORMAT, 5)
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@pytest.fixture
def pool() -> Iterator[int]:
    """A pool with room for one arena of SPEC; reserves pages for the time where it may."""
    if free_huge_pages() >= SPEC.total_bytes:
        yield free_huge_pages()
        return
    before = NR_HUGEPAGES.read_text()
    try:
        NR_HUGEPAGES.write_text(str(int(before) + SPEC.total_bytes // HUGE_PAGE))
    except OSError:
        pytest.skip("the kernel's pool has no huge pages, and this user may not reserve any")
    try:
        if free_huge_pages() < SPEC.total_bytes:
            pytest.skip("the kernel has no memory in one piece for huge pages")
        yield free_huge_pages()
    finally:
        NR_HUGEPAGES.write_text(before)


@pytest.fixture
def small_pool(pool: int) -> int:
    """A pool that a test may ask more of."""
    if pool > 1 << 30:
        pytest.skip(f"the pool has {pool} bytes: more than that is too much to take for a test")
    return pool


def open_arenas() -> int:
    """Memory files of arenas that this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            count += "flexkv-arena" in os.readlink(f"/proc/self/fd/{name}")
    return count


def page_size(made: Arena) -> int:
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == made.address:
            return int(line.rpartition("kernelpagesize_kB=")[2]) * 1024
    raise AssertionError("not mapped")


def test_an_arena_takes_huge_pages_of_the_pool_and_gives_them_back(pool: int) -> None:
    made = Arena.create(SPEC)
    try:
        assert page_size(made) == HUGE_PAGE
        assert resident(made.address) == SPEC.total_bytes
        assert free_huge_pages() == pool - SPEC.total_bytes
        assert made.address % HUGE_PAGE == 0
    finally:
        made.close()
    assert free_huge_pages() == pool


def test_other_processes_map_an_arena_of_huge_pages_by_what_rank_0_tells(pool: int) -> None:
    made = Arena.create(SPEC)
    other = Arena(os.dup(made.fd), SPEC)
    try:
        other.populate(1)
        other.slot_view(4)[-3:] = b"abc"
        assert bytes(made.slot_view(4)[-3:]) == b"abc"
    finally:
        other.close()
        made.close()
    assert free_huge_pages() == pool


@pytest.mark.parametrize("kind", list(Pages))
def test_no_process_can_resize_the_memory_of_another(
    kind: Pages, request: pytest.FixtureRequest
) -> None:
    if kind is Pages.POOL:
        request.getfixturevalue("pool")
    fd = create_file(HUGE_PAGE, kind)
    try:
        for size in (0, 2 * HUGE_PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "seals",
    [
        None,
        0,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
    ],
)
def test_memory_that_another_process_could_resize_is_refused(
    seals: int | None, tmp_path: Path
) -> None:
    if seals is None:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        why = "the arena is not a memory file"
    else:
        fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        why = f"has the seals {seals:#x}; allowed: 0x7"
    os.ftruncate(fd, SPEC.total_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(ArenaError, match=why):
        Arena(fd, SPEC)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_pool_too_small_for_all_of_the_arena_is_left_alone(small_pool: int) -> None:
    made = Arena.create(ArenaSpec(FORMAT, 5 + small_pool // FORMAT.slot_bytes))
    try:
        assert page_size(made) == mmap.PAGESIZE
        assert free_huge_pages() == small_pool
    finally:
        made.close()


@pytest.mark.parametrize("step", ["create_file", "populate"])
def test_when_the_pool_refuses_ordinary_memory_is_taken(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a container without the right to huge pages meets: the pool has them, the kernel says no
    when the file is made, or (a cgroup's limit) when its pages are touched."""
    real = {"create_file": create_file, "populate": populate}[step]
    calls = []

    def first_call_fails(*args: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return real(*args)  # type: ignore[operator]

    before = open_arenas()
    monkeypatch.setattr(arena, "free_huge_pages", lambda: SPEC.total_bytes)
    if step == "populate":  # without a pool the kernel would refuse before
        monkeypatch.setattr(arena, "create_file", lambda size, _: create_file(size, Pages.ORDINARY))
    monkeypatch.setattr(arena, step, first_call_fails)
    made = Arena.create(SPEC)
    assert len(calls) == 2
    assert resident(made.address) == SPEC.total_bytes
    assert open_arenas() > before
    made.close()
    assert open_arenas() == before


def test_ordinary_memory_that_is_not_there_is_not_taken_instead_of_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a size that only the pool has room for, which another process takes meanwhile."""
    monkeypatch.setattr(arena, "available_memory", lambda **_: 3 << 20)
    monkeypatch.setattr(arena, "free_huge_pages", lambda: 12 << 20)
    spec = plan_arena(FORMAT, 7 / 1024)
    assert spec.total_bytes <= 12 << 20
    monkeypatch.setattr(arena, "free_huge_pages", lambda: 0)
    with pytest.raises(ArenaError, match=r"cannot create an arena of \d+ bytes; allowed: at most"):
        Arena.create(spec)


def test_a_size_that_the_plan_takes_from_the_pool_fits_into_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "available_memory", lambda **_: 0)
    for pool_bytes in range(8 << 20, 20 << 20, HUGE_PAGE):
        monkeypatch.setattr(arena, "free_huge_pages", lambda size=pool_bytes: size)
        with pytest.raises(ArenaError) as refused:
            plan_arena(FORMAT, 1.0)
        allowed = float(str(refused.value).split("at most ")[1].split()[0])
        size = max(allowed - 0.005, 1 / 1024)
        assert plan_arena(FORMAT, size).total_bytes <= pool_bytes


@pytest.mark.skipif(
    not (SHMEM_HUGE.exists() and {"[advise]", "[always]"} & set(SHMEM_HUGE.read_text().split())),
    reason=f"{SHMEM_HUGE} forbids huge pages",
)
def test_ordinary_memory_is_in_huge_pages_where_the_kernel_allows() -> None:
    made = Arena.create(ArenaSpec(FORMAT, 64))
    try:
        smaps = Path("/proc/self/smaps").read_text()
        mine = smaps[smaps.index(f"{made.address:x}-") :]
        assert int(mine.split("ShmemPmdMapped:")[1].split()[0]) > 0
    finally:
        made.close()


def test_memory_lies_on_the_wanted_node(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [n for n in range(64) if processors_of(n) & os.sched_getaffinity(0)]
    affinity = os.sched_getaffinity(0)
    for node in nodes:
        made = Arena.create(ArenaSpec(FORMAT, 20), numa_nodes=frozenset({node}))
        try:
            assert bytes_by_node(made.address) == {node: made.spec.total_bytes}
        finally:
            made.close()
    assert nodes
    assert os.sched_getaffinity(0) == affinity
    assert not caplog.records


def test_memory_is_spread_over_several_nodes_in_equal_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which thread fills what is what places it: here one processor plays a node."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("one processor only")
    import flexkv.host.memory_file as module

    monkeypatch.setattr(module, "processors_of", lambda node: {processors[node]})
    monkeypatch.setattr(module, "_POPULATE_CHUNK", HUGE_PAGE)
    seen: list[int] = []
    monkeypatch.setattr(
        module.os, "posix_fallocate", lambda *_: seen.append(*os.sched_getaffinity(0))
    )
    fd = create_file(8 * HUGE_PAGE, Pages.ORDINARY)
    # An address that is not page-aligned is EINVAL, as all of this is on an old kernel.
    populate(fd, 1, 8 * HUGE_PAGE, 4, nodes=[0, 1])
    os.close(fd)
    assert sorted(seen) == [processors[0]] * 4 + [processors[1]] * 4


def test_memory_elsewhere_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = SPEC.total_bytes
    monkeypatch.setattr(arena, "bytes_by_node", lambda _: {0: size // 2, 1: size - size // 2})
    with caplog.at_level(logging.WARNING):
        Arena.create(SPEC, numa_nodes=frozenset({0, 1})).close()
        assert not caplog.records
        Arena.create(SPEC, numa_nodes=frozenset({0})).close()
    assert "are not on NUMA nodes [0]" in caplog.text


def test_old_kernels_fill_the_file_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    import flexkv.host.memory_file as module

    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as before Linux 5.14
    made = Arena.create(SPEC)
    try:
        assert os.fstat(made.fd).st_blocks * 512 == SPEC.total_bytes
    finally:
        made.close()


TOO_MUCH = """
import sys
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.host import arena
arena.free_huge_pages = lambda: 1 << 40  # as if: the kernel knows better
spec = ArenaSpec(BlockFormat(1, (1 << 20,)), 5 + int(sys.argv[1]) // (1 << 20))
made = Arena.create(spec)
made.slot_view(spec.num_slots - 1)[:] = bytes(1 << 20)
print("alive", made.spec.total_bytes)
"""


def test_a_pool_that_runs_out_does_not_end_the_process(small_pool: int) -> None:
    command = [sys.executable, "-c", TOO_MUCH, str(small_pool)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode not in {-signal.SIGBUS, -signal.SIGKILL}, done.stderr
    assert done.stdout.startswith("alive"), done.stderr


def test_memory_is_asked_for_in_parts_where_it_is_waited_for() -> None:
    size = 600 << 20
    events: list[int] = []
    fd = create_file(size, Pages.ORDINARY)
    with mmap.mmap(fd, size) as mapped:
        address = ctypes.addressof(anchor := ctypes.c_char.from_buffer(mapped))

        def wait(wanted: int) -> None:
            filled = sum(-each for each in events if each < 0)
            assert os.fstat(fd).st_blocks * 512 <= filled
            events.append(wanted)

        populate(fd, address, size, 2, filled=lambda count: events.append(-count), wait=wait)
        del anchor
    os.close(fd)
    assert [each for each in events if each > 0] == [256 << 20, 256 << 20, 88 << 20]
    assert sum(events) == 0
