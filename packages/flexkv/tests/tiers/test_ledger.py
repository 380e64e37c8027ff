# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import resource
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexkv.tiers.disk.ledger import FILE, Ledger, load_ledger, save_ledger

DAY = 24 * 3600
COUNTS = st.integers(0, 1 << 60)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1.8e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(time, "time", made)
    yield made
    monkeypatch.undo()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 7200), st.integers(1, 40)), max_size=60),
    st.integers(1, 200),
)
def test_no_24_hours_see_more_than_the_budget(
    clock: Clock, steps: list[tuple[int, int]], day_bytes: int
) -> None:
    ledger = Ledger()
    written: list[tuple[float, int]] = []
    for seconds, size in steps:
        clock.now += seconds
        if ledger.may_write(size, day_bytes):
            ledger.book_write(size)
            written.append((clock.now, size))
    for end, _ in written:
        assert sum(size for at, size in written if end - DAY < at <= end) <= day_bytes


def test_the_budget_returns(clock: Clock) -> None:
    ledger = Ledger()
    ledger.book_write(10)
    assert not ledger.may_write(1, 10)
    assert ledger.may_write(1, None)
    clock.now += DAY + 3600
    assert ledger.may_write(10, 10)


def test_what_was_not_written_after_all_does_not_count(clock: Clock) -> None:
    ledger = Ledger()
    ledger.book_write(10)
    ledger.book_write(-10)
    assert ledger.may_write(10, 10)
    ledger.book_write(10)
    clock.now += 3600
    ledger.book_write(-10)
    clock.now += DAY
    ledger.book_write(10)
    assert not ledger.may_write(1, 10)


def test_a_clock_that_was_put_back_does_not_use_up_the_budget_for_ever(
    tmp_path: Path, clock: Clock
) -> None:
    ledger = Ledger()
    ledger.book_write(10)
    save_ledger(str(tmp_path), ledger.dump())
    clock.now -= 1000 * DAY
    ledger = load_ledger(str(tmp_path))
    assert not ledger.may_write(1, 10)
    clock.now += DAY + 3600
    assert ledger.may_write(10, 10)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.builds(Ledger, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.just({})),
    st.lists(st.integers(0, 1 << 50), max_size=24),
)
def test_counters_survive(tmp_path: Path, clock: Clock, ledger: Ledger, sizes: list[int]) -> None:
    hour = int(clock.now) // 3600
    ledger.written_bytes = {hour - age: size for age, size in enumerate(sizes)}
    save_ledger(str(tmp_path), ledger.dump())
    assert load_ledger(str(tmp_path)) == ledger
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


GOOD = json.dumps(asdict(Ledger(1, 2, 3, 4, 5, {400000: 6}))).encode()
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
]


@pytest.mark.parametrize("content", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_ledger_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert load_ledger(str(tmp_path)) == Ledger()


def test_no_ledger_is_an_empty_one(tmp_path: Path) -> None:
    assert load_ledger(str(tmp_path)) == Ledger()
    (tmp_path / FILE).mkdir()
    assert load_ledger(str(tmp_path)) == Ledger()


@given(st.binary(max_size=3), st.integers(0, len(GOOD) - 1))
def test_a_damaged_ledger_never_raises(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes, place: int
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    (folder / FILE).write_bytes(GOOD[:place] + damage + GOOD[place + len(damage) :])
    ledger = load_ledger(str(folder))
    assert all(size >= 0 for size in ledger.written_bytes.values())


def test_a_ledger_for_which_there_is_no_room_leaves_the_old_one(tmp_path: Path) -> None:
    save_ledger(str(tmp_path), GOOD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(GOOD) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=r"No space left|too large"):
            save_ledger(str(tmp_path), json.dumps({"longer": "x" * len(GOOD)}).encode())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / FILE).read_bytes() == GOOD
