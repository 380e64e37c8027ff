# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

import pytest
from resident import resident

from flexkv import ArenaError
from flexkv.host import arena as arena_module
from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.layout import SLOT_ALIGNMENT, BlockFormat
from flexkv.system.available import available_memory
from flexkv.types.mover import Status

FORMAT = BlockFormat(2, (5000, 5000))
GIB = 1 << 30


def test_arena_is_filled_at_start_and_slots_are_aligned() -> None:
    spec = ArenaSpec(FORMAT, 10)
    arena = Arena.create(spec)
    try:
        assert resident(arena.address) == spec.total_bytes
        starts = [arena.shard_offset(slot, rank) for slot in range(10) for rank in range(2)]
        assert starts == sorted(starts)
        assert all(start % SLOT_ALIGNMENT == 0 for start in starts[::2])
        assert starts[0] == spec.slots_offset
        assert starts[-1] + 5000 <= spec.total_bytes
    finally:
        arena.close()
        arena.close()  # idempotent


def test_two_mappings_share_bytes_and_the_board() -> None:
    spec = ArenaSpec(FORMAT, 2)
    first = Arena.create(spec)
    second = Arena(os.dup(first.fd), spec)
    try:
        ctypes.memset(first.address + first.shard_offset(1, 1), 0x5A, 5000)
        seen = ctypes.string_at(second.address + second.shard_offset(1, 1), 5000)
        assert seen == b"\x5a" * 5000
        cell = first.board.acquire()
        assert cell is not None
        second.board.report(cell, 0, Status.DONE)
        assert first.board.status(cell) is Status.PENDING
        ctypes.c_uint32.from_address(second.board.flag_address(cell, 1)).value = Status.FAILED
        assert first.board.status(cell) is Status.FAILED
    finally:
        second.close()
        first.close()


def test_no_file_is_left_and_the_memory_goes_with_the_mapping() -> None:
    arena = Arena.create(ArenaSpec(FORMAT, 100))
    assert os.fstat(arena.fd).st_nlink == 0  # no name anywhere
    address = arena.address
    assert resident(address)
    arena.close()
    assert not resident(address)


def test_a_view_that_lives_on_keeps_the_memory_and_close_does_not_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena = Arena.create(ArenaSpec(FORMAT, 100))
    address, fd, view = arena.address, arena.fd, arena.slot_view(3)
    view[:4] = b"kept"
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    (line,) = [each.getMessage() for each in caplog.records]
    assert "a view of the arena's" in line
    assert bytes(view[:4]) == b"kept"
    del view
    assert not resident(address)


def test_wrong_size_is_refused() -> None:
    arena = Arena.create(ArenaSpec(FORMAT, 2))
    try:
        with pytest.raises(ArenaError, match=r"arena has \d+ bytes; allowed: \d+"):
            Arena(os.dup(arena.fd), ArenaSpec(FORMAT, 1000))
    finally:
        arena.close()


def test_size_follows_the_setting_and_the_memory_there_is() -> None:
    assert plan_arena(FORMAT, 0.01).num_slots == int(0.01 * (1 << 30)) // FORMAT.slot_bytes
    default = plan_arena(FORMAT, None).num_slots * FORMAT.slot_bytes
    assert default <= min(16 << 30, available_memory())


@pytest.mark.parametrize(
    ("setting", "pool", "size"), [(None, 0, 4), (None, 5, 10), (None, 10, 12.5), (10.0, 5, 10)]
)
def test_each_engine_of_a_server_takes_its_part_by_default(
    monkeypatch: pytest.MonkeyPatch, setting: float | None, pool: int, size: float
) -> None:
    monkeypatch.setattr(arena_module, "available_memory", lambda promised=(): 100 * GIB)
    monkeypatch.setattr(arena_module, "free_huge_pages", lambda: 0)
    block_format = BlockFormat(1, (1 << 20,))
    spec = plan_arena(block_format, setting, pool_blocks=pool << 10, engines=4)
    assert spec.slots_bytes == size * GIB


@pytest.mark.parametrize(
    ("setting", "pool", "size"),
    [
        (None, 0, 16),
        (None, 5, 16),
        (None, 20, 40),
        (None, 40, 50),
        (None, 60, 50),
        (10.0, 20, 10),
        (20.0, 20, 20),
        (21.0, 20, 21),
    ],
)
def test_host_memory_is_larger_than_the_engines_own_cache(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: float | None,
    pool: int,
    size: int,
) -> None:
    """Otherwise it has the same blocks, and gives no hit."""
    monkeypatch.setattr(arena_module, "available_memory", lambda promised=(): 100 * GIB)
    monkeypatch.setattr(arena_module, "free_huge_pages", lambda: 0)
    block_format = BlockFormat(2, (1 << 20, 1 << 20))
    blocks = pool * GIB // block_format.slot_bytes * block_format.engine_blocks
    with caplog.at_level(logging.WARNING):
        spec = plan_arena(block_format, setting, pool_blocks=blocks)
    assert spec.slots_bytes == size * GIB
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == (size <= pool)
    for line in said:
        assert f"has {size:.2f} GiB" in line
        assert f"own KV cache {pool:.2f} GiB" in line
        assert "100.00 GiB are available" in line


@pytest.mark.parametrize(
    ("setting", "pages", "size"), [(None, 1, 2), (None, 20, 40), (None, 60, 50), (3.0, 1, 3)]
)
def test_without_an_engine_the_pages_decide_the_default(
    monkeypatch: pytest.MonkeyPatch, setting: float | None, pages: int, size: int
) -> None:
    monkeypatch.setattr(arena_module, "available_memory", lambda promised=(): 100 * GIB)
    monkeypatch.setattr(arena_module, "free_huge_pages", lambda: 0)
    block_format = BlockFormat(1, (1 << 20,))
    assert plan_arena(block_format, setting, pages=pages << 10).slots_bytes == size * GIB


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ArenaError, match=r"cpu_cache_gb is 1000000 GiB; allowed: at most \d+"):
        plan_arena(FORMAT, 1e6)


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(ArenaError, match="is 1e-06 GiB, less than one block of 12288 bytes; allow"):
        plan_arena(FORMAT, 1e-6)


def test_a_default_that_is_too_small_is_not_given_as_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flexkv.host.arena.available_memory", lambda promised: 20000)
    monkeypatch.setattr("flexkv.host.arena.free_huge_pages", lambda: 0)
    with pytest.raises(ArenaError, match="cpu_cache_gb is not set, and its default has 10000 byte"):
        plan_arena(FORMAT, None)


class Machine:
    """A machine with so many bytes, which gets more while it uses them.

    Attributes:
        growth: bytes that it gets at each question, up to `most`.
        used: bytes of the arena, as far as they were asked for.
        short: how often the arena took memory that the machine did not have beside 2 GiB.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, growth: int, most: int) -> None:
        self.size, self.growth, self.most = size, growth, most
        self.used = self.short = 0
        monkeypatch.setattr(arena_module, "available_memory", self.available)
        monkeypatch.setattr(arena_module, "free_huge_pages", lambda: 0)
        monkeypatch.setattr(arena_module, "populate", self.populate)
        monkeypatch.setattr(arena_module, "_GROWTH_SECONDS", 0.05)
        monkeypatch.setattr(arena_module, "_GROWTH_POLL_SECONDS", 0.001)

    def available(self, promised: object = ()) -> int:
        self.size = min(self.size + self.growth, self.most)
        return self.size - self.used

    def populate(self, fd: int, address: int, size: int, *others: Any) -> None:
        wait = others[-1]
        for start in range(0, size, 256 << 20):
            piece = min(256 << 20, size - start)
            wait(piece)
            self.short += self.size - self.used < piece + (2 << 30)
            self.used += piece


def test_memory_that_grows_is_taken_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(monkeypatch, 4 * GIB, growth=64 << 20, most=64 * GIB)
    spec = plan_arena(FORMAT, 32.0, grows=True)
    arena = Arena.create(spec)
    arena.close()
    assert machine.used == spec.total_bytes
    assert machine.short == 0
    assert "memory_grows is set" in caplog.text


def test_an_arena_that_fits_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 33 * GIB, growth=0, most=33 * GIB)
    assert not plan_arena(FORMAT, 32.0, grows=True).grows


def test_memory_that_stops_growing_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 4 * GIB, growth=64 << 20, most=20 * GIB)
    spec = plan_arena(FORMAT, 32.0, grows=True)
    with pytest.raises(ArenaError, match=r"GiB are available, and have not grown for"):
        Arena.create(spec)
    assert machine.used <= 18 * GIB
    assert machine.short == 0


def test_without_the_setting_an_arena_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch, 4 * GIB, growth=64 << 20, most=64 * GIB)
    with pytest.raises(ArenaError, match="or memory_grows if the machine gets more memory"):
        plan_arena(FORMAT, 32.0)
