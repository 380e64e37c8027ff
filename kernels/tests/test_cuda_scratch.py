# SPDX-License-Identifier: Apache-2.0
"""Memory for measurements is like an engine's arena."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv_kernels import cuda_scratch
from flexkv_kernels.cuda_scratch import HostKind, scratch_memory
from kernels.tests.fake_cuda.fake_driver import FakeCuda

SIZE = 1 << 20


def test_the_kind_of_an_arena_is_where_its_memory_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(ArenaSpec(BlockFormat(1, (SIZE,)), 4))
    try:
        placed = {3: 600, 1: 380, 0: 20}
        monkeypatch.setattr(cuda_scratch, "bytes_by_node", lambda address: placed)
        assert HostKind.of(arena) == HostKind((1, 3), huge=False)
        monkeypatch.setattr(cuda_scratch, "bytes_by_node", lambda address: {})
        assert HostKind.of(arena) == HostKind()
    finally:
        arena.close()


def arenas() -> list[int]:
    """Addresses at which this process has an arena."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [int(line.partition("-")[0], 16) for line in maps if "flexkv-arena" in line]


def test_scratch_memory_is_shared_memory_as_an_arena(fake: FakeCuda) -> None:
    live = fake.live
    with scratch_memory(0, fake.path, SIZE, 3 * SIZE, HostKind()) as scratch:
        before = arenas()  # those that other tests have not closed yet among them
        assert any(start <= scratch.arena < start + (4 << 20) for start in before)
        assert scratch.arena % mmap.PAGESIZE == 0
        ctypes.memset(scratch.arena, 1, SIZE)
        ctypes.memset(scratch.pages, 1, scratch.page_bytes)  # the fake device's is the host's
        assert fake.live > live
    assert fake.live == live
    assert not any(start <= scratch.arena < start + (4 << 20) for start in arenas())


def test_memory_that_the_host_lacks_is_an_error(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = fake.live
    monkeypatch.setattr("flexkv.host.arena.available_memory", lambda promised: 0)
    with (
        pytest.raises(MemoryError, match="cannot create an arena"),
        scratch_memory(0, fake.path, SIZE, SIZE, HostKind()),
    ):
        pass
    assert fake.live == live
