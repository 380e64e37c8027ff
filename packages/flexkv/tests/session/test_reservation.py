# SPDX-License-Identifier: Apache-2.0
"""Engines that start together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sessions import shard

from flexkv import ArenaError
from flexkv.host import arena, memory_file
from flexkv.host.arena import Arena, ArenaSpec, plan_arena
from flexkv.layout import BlockFormat
from flexkv.session import alone
from flexkv.session.reservation import Reservation
from flexkv.system.available import Promise, memory_groups
from packages.inside import end_reservation

AVAILABLE = 256 << 20


@contextlib.contextmanager
def reserved(root: Path, size: int) -> Iterator[Reservation]:
    with contextlib.closing(Reservation(str(root))) as reservation:
        with reservation.turn():
            reservation.promise(size)
        yield reservation


def seen(root: Path) -> list[int]:
    """The promises that another process sees."""
    with Reservation(str(root)).turn() as promised:
        assert all(each.groups == memory_groups() for each in promised)
        return [each.size for each in promised]


def test_a_promise_is_seen_until_its_memory_is_taken(tmp_path: Path) -> None:
    with reserved(tmp_path, 100) as one:
        assert seen(tmp_path) == [100]
        one.filled(40)
        with reserved(tmp_path, 7):
            assert sorted(seen(tmp_path)) == [7, 60]
        assert seen(tmp_path) == [60]
        one.filled(70)
        assert seen(tmp_path) == [0]
    assert seen(tmp_path) == []
    assert os.listdir(tmp_path) == ["lock"]


HOLDER = """
import sys, time
from flexkv.session.reservation import Reservation
one = Reservation(sys.argv[1])
with one.turn():
    one.promise(100)
print("promised", flush=True)
time.sleep(600)
"""


def test_the_promise_of_a_killed_process_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "promised\n"
        assert seen(tmp_path) == [100]
        process.kill()
    assert seen(tmp_path) == []
    assert len(list(tmp_path.glob("*.memory"))) == 1
    with reserved(tmp_path, 7):  # which removes the file
        assert len(list(tmp_path.glob("*.memory"))) == 1
        assert seen(tmp_path) == [7]


def test_a_forked_child_does_not_keep_a_promise(tmp_path: Path) -> None:
    held, release = os.pipe(), os.pipe()
    with reserved(tmp_path, 100) as one:
        child = os.fork()
        if child == 0:
            os.write(held[1], b"1")
            os.read(release[0], 1)
            os._exit(0)
        try:
            os.read(held[0], 1)
            end_reservation(one)  # as if this process had been killed
            assert seen(tmp_path) == []
        finally:
            os.write(release[1], b"1")
            os.waitpid(child, 0)


def test_one_process_plans_at_a_time(tmp_path: Path) -> None:
    with (
        Reservation(str(tmp_path)).turn(),
        (tmp_path / "lock").open() as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_says_nothing_is_no_promise(tmp_path: Path) -> None:
    with reserved(tmp_path, 100):
        (promise,) = tmp_path.glob("*.memory")
        for content in (b"", b"[]", b'{"bytes": "many"}', b"7"):
            promise.write_bytes(content)
            assert seen(tmp_path) == []


def test_without_a_runtime_directory_an_engine_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with reserved(tmp_path / "file", 100) as one:
        one.filled(100)
    assert "cannot see each other's memory: runtime_dir" in caplog.text


def start(root: Path) -> Arena:
    def plan(block_format: BlockFormat, promised: Sequence[Promise]) -> ArenaSpec:
        return plan_arena(block_format, None, promised)

    return alone(str(root), shard(0), plan, threads=1).arena


def test_engines_that_start_together_never_take_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them plan before one of them takes memory."""
    waiting, go = threading.Semaphore(0), threading.Event()

    def available(promised: Sequence[Promise] = ()) -> int:
        return AVAILABLE - sum(each.size for each in promised)

    def populate(*arguments: Any) -> None:
        waiting.release()
        assert go.wait(60)

    monkeypatch.setattr(arena, "available_memory", available)
    monkeypatch.setattr(arena, "populate", populate)
    with ThreadPoolExecutor(4) as engines:
        started = [engines.submit(start, tmp_path) for _ in range(4)]
        for _ in started:
            assert waiting.acquire(timeout=60)
        with pytest.raises(ArenaError, match=r"available on this machine now beside 0\.2. GiB"):
            alone(
                str(tmp_path),
                shard(0),
                lambda *given: plan_arena(given[0], 0.1, given[1]),
                threads=1,
            )
        go.set()
        arenas = [each.result() for each in started]
    sizes = sorted(each.spec.total_bytes for each in arenas)
    for each in arenas:
        each.close()
    assert sum(sizes) <= AVAILABLE
    assert sizes[-1] >= AVAILABLE // 2 - memory_file.HUGE_PAGE
    assert not list(tmp_path.glob("*.memory"))


def test_a_start_that_fails_promises_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def populate(*arguments: Any) -> None:
        (promise,) = seen(tmp_path)
        assert promise > 0
        raise OSError("no memory")

    monkeypatch.setattr(arena, "populate", populate)
    with pytest.raises(ArenaError, match="no memory"):
        start(tmp_path)
    assert seen(tmp_path) == []


def test_what_is_filled_is_no_longer_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    real = Reservation.filled

    def filled(self: Reservation, size: int) -> None:
        real(self, size)
        left.extend(seen(tmp_path))

    monkeypatch.setattr(Reservation, "filled", filled)
    monkeypatch.setattr(arena, "available_memory", lambda **_: 96 << 20)
    monkeypatch.setattr(arena, "free_huge_pages", lambda: 0)
    made = start(tmp_path)
    total = made.spec.total_bytes
    made.close()
    assert left == [max(0, total - size) for size in range(16 << 20, total + (16 << 20), 16 << 20)]
