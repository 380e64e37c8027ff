# SPDX-License-Identifier: Apache-2.0
"""What nodes that share a store agree on, whatever they miss of it."""

from __future__ import annotations

import threading

import pytest

from flexkv.tiers import epochs
from flexkv.tiers.epochs import Epochs
from packages.conftest import PATIENCE_SECONDS, Clock


class Record:
    """See `EpochRecord`; kept in memory, and reached or not."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.reached = True

    def read(self) -> bytes | None:
        if not self.reached:
            raise ConnectionError("cut off")
        return self.data

    def create(self, record: bytes) -> None:
        if self.read() is None:
            self.data = record

    def replace(self, record: bytes) -> None:
        self.read()
        self.data = record


@pytest.fixture(autouse=True)
def passing_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "time", clock)
    monkeypatch.setattr(clock, "sleep", clock.skip, raising=False)


def test_processes_that_open_a_store_agree() -> None:
    record = Record()
    one, other = Epochs(record), Epochs(record)
    epoch = one.open()
    assert other.open() == epoch
    assert one.folder(epoch) == other.folder(epoch)


def test_of_two_that_begin_at_once_one_wins() -> None:
    class Late(Record):
        """Another process writes the record between this one's read and its write."""

        def create(self, record: bytes) -> None:
            self.data = self.data or epochs.Epoch.begin().to_bytes()
            super().create(record)

    record = Late()
    one, other = Epochs(record), Epochs(record)
    assert one.folder(one.open()) == other.folder(other.open())


def test_after_a_reset_of_one_the_others_go_on_together_elsewhere(clock: Clock) -> None:
    record = Record()
    one, other, third = Epochs(record), Epochs(record), Epochs(record)
    shared, own = one.open(), "0" * 32
    assert other.open() == third.open() == shared
    before = other.folder(shared)
    one.renew()
    clock.skip(epochs.FRESH_SECONDS)
    # Keys mean in these what they meant.
    assert other.folder(shared) == third.folder(shared) != before
    later = Epochs(record)
    folders = {one.folder(own), other.folder(shared), later.folder(later.open()), before}
    assert len(folders) == 4


def test_a_node_that_was_cut_off_finds_nothing_of_before(clock: Clock) -> None:
    record, other_record = Record(), Record()
    one = Epochs(record)
    shared = one.open()
    before = one.folder(shared)
    other_record.data = record.data
    cut = Epochs(other_record)
    assert cut.open() == shared
    other_record.reached = False
    one.renew()
    clock.skip(epochs.FRESH_SECONDS)
    with pytest.raises(ConnectionError):
        cut.folder(shared)
    other_record.data, other_record.reached = record.data, True
    assert cut.folder(shared) != before


def test_after_a_clear_all_go_on_together_elsewhere(clock: Clock) -> None:
    record = Record()
    one, other = Epochs(record), Epochs(record)
    shared = one.open()
    other.open()
    before = one.folder(shared)
    assert other.folder(shared) == before
    private = other.folder("0" * 32)
    assert epochs.clear(record)
    # No process counts on the old record any more: the command has waited for that.
    assert one.folder(shared) == other.folder(shared) != before
    assert other.folder("0" * 32) != private
    assert Epochs(record).open() == shared


def test_nothing_is_cleared_where_nothing_is() -> None:
    record = Record()
    assert not epochs.clear(record)
    assert record.data is None


def test_after_a_loss_of_the_record_all_go_on_together_elsewhere(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    record = Record()
    one, other = Epochs(record), Epochs(record)
    shared = one.open()
    other.open()
    before = one.folder(shared)
    record.data = None
    clock.skip(epochs.FRESH_SECONDS)
    later = one.folder(shared)
    assert later == other.folder(shared) != before
    assert Epochs(record).open() == shared
    (line,) = [each.getMessage() for each in caplog.records]
    assert "was lost" in line


def test_a_record_that_one_writes_at_its_start_after_a_loss_is_that_of_all(clock: Clock) -> None:
    record = Record()
    one, other = Epochs(record), Epochs(record)
    shared = one.open()
    before = one.folder(shared)
    record.data = None
    assert other.open() == shared
    clock.skip(epochs.FRESH_SECONDS)
    assert one.folder(shared) == other.folder(shared) != before


def test_who_was_cut_off_during_a_reset_restores_no_generation(clock: Clock) -> None:
    record, other_record = Record(), Record()
    one = Epochs(record)
    shared = one.open()
    other_record.data = record.data
    cut = Epochs(other_record)
    assert cut.open() == shared
    before = cut.folder(shared)
    one.renew()
    other_record.data = record.data = None  # nobody has read the new one
    clock.skip(epochs.FRESH_SECONDS)
    assert cut.folder(shared) != before


def test_after_a_reset_and_a_loss_processes_that_start_use_the_new_epoch(clock: Clock) -> None:
    record = Record()
    one = Epochs(record)
    shared = one.open()
    one.renew()
    renewed = Epochs(record).open()
    record.data = None
    clock.skip(epochs.FRESH_SECONDS)
    one.folder("0" * 32)
    assert Epochs(record).open() == renewed != shared


def test_a_read_under_way_does_not_undo_a_reset(clock: Clock) -> None:
    record = Record()
    one = Epochs(record)
    shared = one.open()
    read, reset = record.read, threading.Thread(target=one.renew)

    def read_before_the_reset() -> bytes | None:
        data = read()
        record.read = read  # type: ignore[method-assign]
        reset.start()
        reset.join(0.1)  # it waits for this read
        return data

    record.read = read_before_the_reset  # type: ignore[method-assign]
    one.folder(shared)
    reset.join(PATIENCE_SECONDS)
    renewed = Epochs(record).open()
    record.data = None
    clock.skip(epochs.FRESH_SECONDS)
    one.folder("0" * 32)
    assert Epochs(record).open() == renewed != shared


def test_a_lost_record_that_cannot_be_written_hides_all_blocks(clock: Clock) -> None:
    record = Record()
    one = Epochs(record)
    shared = one.open()
    record.data = None
    record.create = lambda _: None  # type: ignore[method-assign]
    clock.skip(epochs.FRESH_SECONDS)
    with pytest.raises(OSError, match="cannot be read back"):
        one.folder(shared)


def test_what_is_no_record_is_an_error() -> None:
    record = Record()
    record.data = b"something else"
    with pytest.raises(OSError, match="not one of FlexKV's"):
        Epochs(record).open()


def test_who_waits_for_a_read_that_fails_does_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Still:
        """All come at the same time, however slow the machine."""

        def monotonic(self) -> float:
            return 1000.0

    monkeypatch.setattr(epochs, "time", Still())
    record = Record()
    one = Epochs(record)
    epoch = one.open()
    reads = threading.Semaphore(0)
    gate = threading.Event()

    def fail() -> bytes | None:
        reads.release()
        gate.wait(PATIENCE_SECONDS)
        raise ConnectionError("cut off")

    record.read = fail  # type: ignore[method-assign]
    failures: list[OSError] = []

    def ask() -> None:
        try:
            one.folder(epoch)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    threads[0].start()
    assert reads.acquire(timeout=PATIENCE_SECONDS)
    for thread in threads[1:]:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert [str(each) for each in failures] == ["cut off"] * 4
    assert not reads.acquire(blocking=False)
