# SPDX-License-Identifier: Apache-2.0
"""What bounds a disk tier at run time: the write budget, its queue, a disk that breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from disk_blocks import (
    DEADLINE,
    FINGERPRINT,
    SLOT,
    Client,
    names,
    opened,
)
from faults.faulty_files import Fault, FaultyFiles, HangingFiles
from faults.test_runs import BadPlaces

from flexkv.tiers import circuit
from flexkv.tiers.base import MAX_KEY_BYTES
from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.disk import drive
from flexkv.tiers.disk.inspect import folder_state
from flexkv.tiers.job import Outcome, Priority, Urgency
from packages.conftest import Clock
from packages.patience import wait_until

DONE = Outcome.DONE


def test_the_write_budget_holds_over_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, day_bytes=10 * SLOT) as client:
        assert client.write(names(6)) == [DONE] * 6
    with opened(tmp_path, day_bytes=10 * SLOT) as client:
        outcomes = client.write(names(20))
        assert outcomes.count(DONE) == 10
        assert outcomes.count(Outcome.DROPPED) == 10
    with opened(tmp_path, day_bytes=10 * SLOT) as client:
        assert client.write([b"more"]) == [Outcome.DROPPED]
        found = client.found(names(20))
        assert client.read(found) == [DONE] * 10
    with opened(tmp_path) as client:
        assert client.write([b"more"]) == [DONE]


@pytest.mark.parametrize("content", [b"", bytes(100), b'{"hit_blocks": -5}'])
def test_damaged_counters_use_up_the_write_budget_and_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    with opened(tmp_path) as client:
        assert client.write(names(6)) == [DONE] * 6
    counters = tmp_path / FINGERPRINT / "counters.json"
    counters.write_bytes(content)
    for _ in range(2):
        with opened(tmp_path, day_bytes=100 * SLOT) as client:
            wait_until(lambda: not folder_state(str(tmp_path / FINGERPRINT)).problem)
            assert client.write([b"more"]) == [Outcome.DROPPED]
            assert client.read(names(6)) == [DONE] * 6
    assert caplog.text.count(f"in {tmp_path / FINGERPRINT}, counters.json is damaged (") == 1
    assert not folder_state(str(tmp_path / FINGERPRINT)).day_is_known
    counters.unlink()  # as the log says
    with opened(tmp_path, day_bytes=100 * SLOT) as client:
        assert client.write([b"more"]) == [DONE]


def test_a_key_that_no_record_can_hold_is_refused_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    longest, too_long = b"k" * MAX_KEY_BYTES, b"k" * (MAX_KEY_BYTES + 1)
    with opened(tmp_path) as client:
        assert client.write([longest, too_long, b"behind"]) == [DONE, *[Outcome.DROPPED] * 2]
        assert client.write([too_long]) == [Outcome.DROPPED]
        assert client.found([longest, too_long]) == [longest]
    assert caplog.text.count("a block's key has 97 bytes") == 1
    with opened(tmp_path) as client:
        assert client.found([longest, too_long, longest[:-1]]) == [longest]
        assert client.read([longest]) == [DONE]


def test_what_is_dropped_does_not_count_as_written(tmp_path: Path) -> None:
    with opened(tmp_path, queue_bytes=16 * SLOT, day_bytes=60 * SLOT) as client:
        assert Outcome.DROPPED in client.write(names(60))
        for key in names(60):
            assert client.write([key]) == [DONE]
        assert client.write([b"more"]) == [Outcome.DROPPED]


def test_what_a_full_queue_drops_is_not_found_and_its_slots_return(tmp_path: Path) -> None:
    with opened(tmp_path, queue_bytes=4 * SLOT) as client:
        outcomes = client.write(names(60))
        assert set(outcomes) == {DONE, Outcome.DROPPED}
        written = [key for key, o in zip(names(60), outcomes, strict=True) if o is DONE]
        assert client.found(names(60)) == written
        client.settle()
        assert client.tier.drives[0].index.free_slots == 64 - len(written)


@pytest.mark.parametrize("blocks", [1, 2, 60])
def test_a_cancelled_batch_has_a_result_for_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    for name in ("READ_RUN_BYTES", "WRITE_RUN_BYTES"):
        monkeypatch.setattr(drive, name, blocks * SLOT)
    with opened(tmp_path) as client:
        ticket = client.begin_write(names(60))
        client.tier.raise_priority(ticket, Urgency(Priority.PREFETCH))
        client.tier.cancel(ticket)
        written = client.wait(ticket, 60)
        assert set(written) <= {DONE, Outcome.DROPPED}
        client.settle()
        assert client.write(names(60)) == [DONE] * 60
        ticket = client.tier.read(names(60), client.buffers[:60], Priority.PREFETCH)
        client.tier.raise_priority(ticket, Urgency(Priority.LOAD))
        client.tier.cancel(ticket)
        outcomes = client.check(names(60), client.wait(ticket, 60))
        assert set(outcomes) <= {DONE, Outcome.DROPPED}
        client.tier.cancel(ticket)
        client.tier.raise_priority(12345, Urgency(Priority.LOAD))


def test_cancel_drops_whole_runs_and_only_those_that_have_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "READ_RUN_BYTES", 3 * SLOT)
    files = HangingFiles()
    with opened(tmp_path, files=files) as client, files:
        client.write(names(60))
        files.hang(tmp_path)
        ticket = client.tier.read(names(60), client.buffers[:60], Priority.PREFETCH)
        assert files.hanging.wait(DEADLINE)
        client.tier.cancel(ticket)
        files.release()
        outcomes = client.check(names(60), client.wait(ticket, 60))
        runs = [outcomes[i : i + 3] for i in range(0, 60, 3)]
        begun = runs.count([DONE] * 3)
        assert 1 <= begun <= drive.THREADS
        assert runs.count([Outcome.DROPPED] * 3) == 20 - begun
        client.settle()
        assert client.read(names(60)) == [DONE] * 60


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        ("reads", lambda client, i: client.read(names(1, first=i))),
        ("writes", lambda client, i: client.write(names(1, first=1000 + i))),
    ],
)
def test_a_broken_disk_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, act: Callable[[Client, int], object]
) -> None:
    files = FaultyFiles(1, 0.0, Fault.EIO)
    monkeypatch.setattr(circuit, "PAUSE_SECONDS", 3600.0)
    with opened(tmp_path, files=files) as client:
        client.write(names(40))
        (one,) = client.tier.drives
        files.rate = 1.0
        for i in range(circuit.FAILURES):
            assert one.readable
            assert one.room
            act(client, i)
        client.settle()
        assert one.readable is (kind == "writes")
        figures = client.tier.figures
        opened_, closed = (
            (figures.reads, figures.writes) if kind == "reads" else (figures.writes, figures.reads)
        )
        assert opened_ == {CircuitState.OPEN: 1}
        assert closed == {CircuitState.CLOSED: 1}
        assert figures.openings == 1
        assert (one.room > 0) is (kind == "reads")
        if kind == "reads":
            assert not client.tier.drives[0].readable
            assert client.found(names(40)) == []
        before = files.counts.total()
        act(client, 30)
        assert files.counts.total() == before
        files.rate = 0.0
    with opened(tmp_path) as client:
        found = client.found(names(1100))
        assert client.read(found) == [DONE] * len(found)


def test_a_drive_that_is_too_slow_is_left_alone(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path, stall_seconds=1e-9) as client:
        (one,) = client.tier.drives
        for i in range(circuit.FAILURES):
            assert one.room
            client.write(names(1, first=i))
        client.settle()
        assert one.room == 0
        assert one.readable


def test_a_drive_that_works_again_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(circuit, "time", clock)
    files = FaultyFiles(1, 0.0, Fault.EIO)
    with opened(tmp_path, files=files) as client:
        client.write(names(40))
        (one,) = client.tier.drives
        files.rate = 1.0
        for i in range(circuit.FAILURES):
            client.read(names(1, first=i))
        assert client.found(names(40)) == []
        clock.skip(circuit.PAUSE_SECONDS)
        left = names(40)[circuit.FAILURES :]
        assert client.found(names(40)) == left
        assert client.read(left[:1]) == [Outcome.FAILED]
        assert not one.readable
        files.rate = 0.0
        clock.skip(circuit.PAUSE_SECONDS)
        assert client.read(left[1:2]) == [DONE]
        assert client.read(left[1:]) == [DONE] * len(left[1:])
        assert client.tier.figures.reads == {CircuitState.CLOSED: 1}


def test_a_job_counts_once_however_many_blocks_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit, "PAUSE_SECONDS", 3600.0)
    files = FaultyFiles(1, 0.0, Fault.EIO)
    with opened(tmp_path, files=files) as client:
        client.write(names(60))
        (one,) = client.tier.drives
        files.rate = 1.0
        for i in range(2):
            assert client.read(names(28, first=i * 28)) == [Outcome.FAILED] * 28
            client.settle()
        assert one.readable
        files.rate = 0.0
        assert client.read(names(4, first=56)) == [DONE] * 4


def test_a_job_that_got_something_done_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad place in every run, on a disk that works otherwise."""
    monkeypatch.setattr(circuit, "FAILURES", 2)
    monkeypatch.setattr(circuit, "PAUSE_SECONDS", 3600.0)
    with opened(tmp_path, files=(files := BadPlaces())) as client:
        client.write(names(60))
        for first in range(0, 60, 4):
            keys = names(4, first=first)
            slot = client.slots_of(keys)[keys[1]]
            files.bad = ("slab-00000", slot * SLOT, 1)
            assert client.read(keys) == [DONE, Outcome.FAILED, DONE, DONE]
            assert client.tier.drives[0].readable


def test_a_job_that_was_dropped_says_nothing_about_the_disk(tmp_path: Path) -> None:
    files = FaultyFiles(1, 0.0, Fault.EIO)
    with opened(tmp_path, files=files) as client:
        (one,) = client.tier.drives
        files.rate = 1.0
        for i in range(circuit.FAILURES):
            client.tier.cancel(client.begin_write(names(1, first=1000)))
            client.settle()
            assert one.room
            client.write(names(1, first=i))
        client.settle()
        assert one.room == 0
        files.rate = 0.0


def test_the_state_of_the_circuits_is_saved_for_others_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit, "PAUSE_SECONDS", 3600.0)
    files = FaultyFiles(1, 0.0, Fault.EIO)

    def wait_for(client: Client, reads: str) -> None:
        (one,) = client.tier.drives
        wait_until(lambda: folder_state(one.path).reads == reads)
        assert folder_state(one.path).writes == "closed"

    with opened(tmp_path, files=files) as client:
        client.write(names(40))
        wait_for(client, "closed")
        files.rate = 1.0
        for i in range(circuit.FAILURES):
            client.read(names(1, first=i))
        files.rate = 0.0
        wait_for(client, "open")
    with opened(tmp_path) as client:  # another owner, which has done nothing yet
        wait_for(client, "closed")
