# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import os
import resource
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.disk import ledger
from flexkv.tiers.disk.files import open_folder
from flexkv.tiers.disk.ledger import FILE, SCRATCH, Ledger, load_ledger, save_ledger

DAY = 24 * 3600
COUNTS = st.integers(0, 1 << 60)
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""Examples may share fixtures, and a slow machine may take its time."""


class Clock:
    """A clock that is set by hand.

    Attributes:
        now: seconds since the epoch, which somebody may set.
        passed: seconds that have passed.
    """

    def __init__(self) -> None:
        self.now = 1.8e9
        self.passed = 100.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.passed

    def skip(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.passed += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ledger, "time", made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    """An open, empty directory."""
    fd = open_folder(str(tmp_path))
    yield fd
    os.close(fd)


def restarted(folder: int, counted: Ledger) -> Ledger:
    """The ledger of the next process."""
    save_ledger(folder, counted.dump())
    return load_ledger(folder)


@settings(suppress_health_check=SHARED)
@given(
    st.lists(st.tuples(st.integers(0, 7200), st.integers(1, 40)), max_size=60),
    st.integers(1, 200),
)
def test_no_24_hours_see_more_than_the_budget(
    clock: Clock, steps: list[tuple[int, int]], day_bytes: int
) -> None:
    counted = Ledger()
    written: list[tuple[float, int]] = []
    for seconds, size in steps:
        clock.skip(seconds)
        if counted.left(day_bytes) >= size:
            counted.book_write(size)
            written.append((clock.now, size))
    for end, _ in written:
        assert sum(size for at, size in written if end - DAY < at <= end) <= day_bytes


def test_the_budget_returns_after_a_day_and_the_rest_of_its_hour(clock: Clock) -> None:
    counted = Ledger()
    counted.book_write(10)
    assert counted.left(10) < 1
    assert counted.left(None) >= 1
    clock.skip(DAY)
    assert counted.left(10) < 1
    assert counted.day_bytes == 10
    clock.skip(3600)
    assert counted.left(10) >= 10
    assert counted.day_bytes == 0


def test_what_was_not_written_after_all_does_not_count(clock: Clock) -> None:
    counted = Ledger()
    counted.book_write(10)
    counted.book_write(-10)
    assert counted.left(10) >= 10
    counted.book_write(10)
    clock.skip(3600)
    counted.book_write(-10)
    clock.skip(DAY)
    counted.book_write(10)
    assert counted.left(10) < 1


def test_hours_that_are_over_are_forgotten(clock: Clock) -> None:
    counted = Ledger()
    for _ in range(100):
        counted.book_write(1)
        clock.skip(3600)
    assert len(counted.written_bytes) == len(json.loads(counted.dump())["written_bytes"]) + 1 == 25


@pytest.mark.parametrize("jump", [30 * DAY, -30 * DAY, 5 * 3600, -5 * 3600])
@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_is_set_makes_what_was_written_neither_older_nor_younger(
    folder: int, clock: Clock, jump: int, restart: bool
) -> None:
    counted = Ledger()
    counted.book_write(10)
    clock.now += jump
    counted.book_write(10)
    if restart:
        counted = restarted(folder, counted)
    assert counted.day_bytes == 20
    assert counted.left(20) < 1
    clock.now -= jump
    if restart:
        counted = restarted(folder, counted)
    clock.skip(DAY - 3600)
    assert counted.left(20) < 1
    clock.skip(2 * 3600)
    assert counted.left(20) >= 20


def test_a_clock_that_was_put_back_between_processes_does_not_use_up_the_budget_for_ever(
    folder: int, clock: Clock
) -> None:
    counted = Ledger()
    counted.book_write(10)
    save_ledger(folder, counted.dump())
    clock.now -= 1000 * DAY
    counted = load_ledger(folder)
    assert counted.left(10) < 1
    clock.skip(DAY + 3600)
    assert counted.left(10) >= 10


@settings(suppress_health_check=SHARED)
@given(
    st.builds(Ledger, COUNTS, COUNTS, COUNTS, st.just({})),
    st.lists(st.integers(0, 1 << 50), max_size=24),
)
def test_counters_survive(
    tmp_path: Path, folder: int, clock: Clock, counted: Ledger, sizes: list[int]
) -> None:
    hour = int(clock.now) // 3600
    counted.written_bytes = {hour - age: size for age, size in enumerate(sizes)}
    assert restarted(folder, counted) == counted
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


GOOD = json.dumps(
    {
        "hit_blocks": 1,
        "damaged_blocks": 2,
        "written_blocks": 4,
        "written_bytes": {"400000": 6},
    }
).encode()
MALFORMED = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 60000,
    GOOD[:-3],
    GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": 1e999'),
    GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": Infinity'),
    GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": NaN'),
    GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": []'),
    GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": "one"'),
    GOOD.replace(b'{"400000": 6}', b"null"),
    GOOD.replace(b'{"400000": 6}', b'{"an hour": 6}'),
    GOOD.replace(b'{"400000": 6}', b'{"400000": -1e999}'),
    GOOD.replace(b'{"400000": 6}', b'{"400000": -6}'),
    GOOD.replace(b'{"400000": 6}', b'{"-4": 6}'),
    GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": -5'),
    GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": 1.5'),
    GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": 1' + b"0" * 30),
    GOOD.replace(b"}}", b'}, "open_until": {"reads": NaN}}'),
    GOOD.replace(b"}}", b'}, "lost_hour": -1}'),
    bytes(len(GOOD)),
    GOOD + bytes(8),
]


def assert_lost(counted: Ledger, reason: str = "") -> None:
    """No count is taken over, the reason is named, and a daily limit is used up."""
    assert (counted.hit_blocks, counted.damaged_blocks, counted.written_blocks) == (0, 0, 0)
    assert counted.written_bytes == counted.open_until == {}
    assert counted.problem.startswith(f"{FILE} is damaged (")
    assert reason in counted.problem
    assert counted.left(1 << 60) == 0
    assert counted.left(None) == math.inf


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_no_count_of_a_malformed_ledger_is_used(
    tmp_path: Path, folder: int, content: bytes
) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert_lost(load_ledger(folder))


def test_a_nonsense_count_is_named(tmp_path: Path, folder: int) -> None:
    (tmp_path / FILE).write_bytes(GOOD.replace(b'"hit_blocks": 1', b'"hit_blocks": -5'))
    assert_lost(load_ledger(folder), "Expected `int` >= 0 - at `$.hit_blocks`")


@pytest.mark.parametrize("jump", [0, 30 * DAY, -30 * DAY])
def test_after_a_damaged_ledger_the_limit_allows_nothing_for_a_day_over_restarts(
    tmp_path: Path, folder: int, clock: Clock, jump: int
) -> None:
    (tmp_path / FILE).write_bytes(b"")
    counted = restarted(folder, load_ledger(folder))
    assert (counted.problem, counted.day_is_known, counted.left(10)) == ("", False, 0)
    clock.now += jump
    counted.book_write(4)
    counted = restarted(folder, counted)
    clock.skip(DAY - 3600)
    counted = restarted(folder, counted)
    assert (counted.day_is_known, counted.left(10)) == (False, 0)
    clock.skip(2 * 3600)
    for now in (counted, restarted(folder, counted)):
        assert (now.day_is_known, now.left(10)) == (True, 10)


def test_a_good_ledger_is_none_of_those(tmp_path: Path, folder: int) -> None:
    (tmp_path / FILE).write_bytes(GOOD)
    assert load_ledger(folder) == Ledger(1, 2, 4, {400000: 6})


def test_no_ledger_is_an_empty_one(tmp_path: Path, folder: int) -> None:
    assert load_ledger(folder) == Ledger()
    assert load_ledger(folder).left(10) == 10
    (tmp_path / FILE).mkdir()
    assert_lost(load_ledger(folder), "is not a regular file")


@pytest.mark.parametrize("target", ["/dev/zero", "victim"])
def test_links_are_followed_neither_to_read_nor_to_write(
    tmp_path: Path, folder: int, target: str
) -> None:
    (tmp_path / "victim").write_bytes(GOOD)
    for name in (FILE, SCRATCH):
        (tmp_path / name).symlink_to(target)
    assert_lost(load_ledger(folder), "is a symbolic link")
    with pytest.raises(OSError, match="is a symbolic link"):
        save_ledger(folder, b"{}")
    assert (tmp_path / "victim").read_bytes() == GOOD


def test_a_fifo_is_not_waited_for(tmp_path: Path, folder: int) -> None:
    for name in (FILE, SCRATCH):
        os.mkfifo(tmp_path / name)
    assert_lost(load_ledger(folder), "is not a regular file")
    with pytest.raises(OSError, match="is not a regular file"):
        save_ledger(folder, b"{}")


def test_a_ledger_longer_than_any_of_ours_is_not_read_whole(tmp_path: Path, folder: int) -> None:
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(1 << 40)
    assert_lost(load_ledger(folder))


def test_the_ledger_of_a_folder_that_was_made_anew_is_left_as_it_is(
    tmp_path: Path, folder: int
) -> None:
    """As an engine finds it whose folder was removed while it ran."""
    tmp_path.rename(tmp_path.with_name("removed"))
    shutil.rmtree(tmp_path.with_name("removed"))
    tmp_path.mkdir()
    (tmp_path / FILE).write_bytes(GOOD)
    with pytest.raises(FileNotFoundError):
        save_ledger(folder, b"{}")
    assert (tmp_path / FILE).read_bytes() == GOOD


@given(st.binary(max_size=3), st.integers(0, len(GOOD) - 1))
def test_a_damaged_ledger_never_raises(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes, place: int
) -> None:
    path = tmp_path_factory.mktemp("ledger")
    (path / FILE).write_bytes(GOOD[:place] + damage + GOOD[place + len(damage) :])
    fd = open_folder(str(path))
    counted = load_ledger(fd)
    os.close(fd)
    counts = counted.hit_blocks, counted.damaged_blocks, counted.written_blocks
    assert all(count >= 0 for count in (*counts, *counted.written_bytes.values()))
    assert counted.left(10) == 0 if counted.problem else counted.day_is_known


def test_a_ledger_for_which_there_is_no_room_leaves_the_old_one(
    tmp_path: Path, folder: int
) -> None:
    save_ledger(folder, GOOD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(GOOD) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=r"No space left|too large"):
            save_ledger(folder, json.dumps({"longer": "x" * len(GOOD)}).encode())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / FILE).read_bytes() == GOOD


@pytest.mark.parametrize(
    ("ahead", "state"), [(60.0, CircuitState.OPEN), (-60.0, CircuitState.PROBING)]
)
def test_an_open_circuit_is_probing_once_its_pause_is_over(
    ahead: float, state: CircuitState
) -> None:
    saved = Ledger(open_until={"reads": time.time() + ahead})
    assert saved.saved_state("reads") is state
    assert saved.saved_state("writes") is CircuitState.CLOSED
