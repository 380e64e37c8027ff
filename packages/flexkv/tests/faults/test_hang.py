# SPDX-License-Identifier: Apache-2.0
"""A disk that does not answer: the others go on, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from disk_blocks import DEADLINE, FINGERPRINT, SLOT, Client, capacity_of, names, opened
from faults.faulty_files import HangingFiles

from flexkv.tiers import circuit, device
from flexkv.tiers.disk import open_disk_tier, tier
from flexkv.tiers.job import Outcome, Priority
from flexkv.tiers.link import Link
from packages.conftest import Clock

SLOTS = 40
KEYS = names(30)
DONE = Outcome.DONE


def on_drive(client: Client, number: int) -> list[bytes]:
    """Those of `KEYS` that a drive has."""
    return [key for key in KEYS if key in client.tier.drives[number].index]


@pytest.mark.parametrize("hangs", [0, 1])
def test_the_other_directories_go_on_while_one_hangs(
    tmp_path: Path, faults: Callable[[int], None], clock: Clock, hangs: int
) -> None:
    roots = tmp_path / "a", tmp_path / "b"
    files = HangingFiles()
    with opened(*roots, slots=SLOTS, files=files) as client, files:
        client.write(KEYS)
        client.settle()
        lost, left = on_drive(client, hangs), on_drive(client, 1 - hangs)
        assert lost
        assert left
        files.hang(roots[hangs])
        tickets = client.begin_reads(hangs, lost)
        assert client.tier.drives[hangs].readable
        clock.skip(2 * DEADLINE)
        client.pump()
        assert not client.tier.drives[hangs].readable
        assert client.tier.drives[1 - hangs].readable
        assert client.found(KEYS) == left
        assert client.read(KEYS[:20]).count(DONE) == len(set(left) & set(KEYS[:20]))
        more = names(10, first=100)
        assert client.write(more) == [DONE] * 10
        assert client.read(more) == [DONE] * 10
        client.delete(lost[:1])
        for ticket in tickets:
            client.tier.cancel(ticket)
            assert client.pump().get(ticket, {}) in ({}, {0: Outcome.DROPPED})
        files.release()
        for ticket in tickets:
            assert client.wait(ticket, 1)[0] in {DONE, Outcome.DROPPED}
        client.settle()
        assert client.found(KEYS) == [key for key in KEYS if key != lost[0]]
        assert set(client.read(client.found(KEYS))) == {DONE}
    faults(len(lost))


def test_a_tier_whose_only_directory_hangs_is_not_available(
    tmp_path: Path, faults: Callable[[int], None], clock: Clock
) -> None:
    files = HangingFiles()
    with opened(tmp_path, slots=SLOTS, files=files) as client, files:
        client.write(KEYS)
        client.settle()
        files.hang(tmp_path)
        tickets = client.begin_reads(0, KEYS[:10])
        clock.skip(2 * DEADLINE)
        client.pump()
        assert not client.tier.drives[0].readable
        assert client.found(KEYS) == []
        assert client.read(KEYS) == [Outcome.MISSING] * 30
        assert client.write(names(5, first=100)) == [Outcome.DROPPED] * 5
        client.tier.touch(KEYS)
        files.release()
        assert [client.wait(ticket, 1) for ticket in tickets] == [[DONE]] * 10
        assert client.tier.drives[0].readable
        assert client.read(KEYS) == [DONE] * 30
    faults(1)


def test_one_hung_read_costs_its_own_blocks_alone(
    tmp_path: Path, faults: Callable[[int], None], clock: Clock
) -> None:
    """The other threads of the drive go on, and so do writes."""
    files = HangingFiles()
    with opened(tmp_path, slots=SLOTS, files=files) as client, files:
        client.write(KEYS)
        client.settle()
        files.hang(tmp_path)
        hung = client.tier.read(KEYS[:1], client.buffers[-1:], Priority.LOAD)
        assert files.hanging.wait(DEADLINE)
        files.hang_no_more()
        clock.skip(2 * DEADLINE)
        client.pump()
        assert client.tier.drives[0].readable
        assert set(client.tier.hung(hung)) == {0}
        assert client.found(KEYS) == KEYS
        assert client.read(KEYS[1:]) == [DONE] * 29
        assert client.write(names(5, first=100)) == [DONE] * 5
        assert hung not in client.results
        files.release()
        assert client.wait(hung, 1) == [DONE]
        assert not client.tier.hung(hung)
    faults(1)


def test_a_hang_counts_for_the_circuit_when_it_shows_and_not_when_it_ends(
    tmp_path: Path, faults: Callable[[int], None], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit, "FAILURES", 1)
    monkeypatch.setattr(circuit, "PAUSE_SECONDS", 0.0)
    files = HangingFiles()
    with opened(tmp_path, slots=SLOTS, files=files) as client, files:
        client.write(KEYS)
        client.settle()
        files.hang(tmp_path)
        hung = client.tier.read(KEYS[:1], client.buffers[-1:], Priority.LOAD)
        assert files.hanging.wait(DEADLINE)
        clock.skip(2 * DEADLINE)
        client.pump()
        assert client.tier.figures.openings == 1
        files.hang_no_more()
        assert client.read(KEYS[1:2]) == [DONE]  # the probe
        files.release()
        assert client.wait(hung, 1) == [DONE]
        assert client.tier.figures.openings == 1
    faults(1)


def test_every_drive_comes_to_an_end_in_the_same_seconds(
    tmp_path: Path, faults: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Three that hang take no longer than one."""
    monkeypatch.setattr(tier, "time", clock)
    monkeypatch.setattr(device, "CLOSE_SECONDS", 0.2)
    waited: list[float] = []
    real = Link.close

    def close(link: Link, timeout: float) -> bool:
        waited.append(timeout)
        ended = real(link, 0.0)
        clock.skip(timeout)
        return ended

    monkeypatch.setattr(Link, "close", close)
    roots = [str(tmp_path / name) for name in "abc"]
    files = HangingFiles()
    with files:
        opened_tier = open_disk_tier(roots, FINGERPRINT, SLOT, capacity_of(SLOTS, 3), files=files)
        client = Client(opened_tier)
        client.write(KEYS)
        client.settle()
        files.hang(tmp_path)
        opened_tier.read(KEYS, client.buffers[: len(KEYS)], Priority.LOAD)
        assert files.hanging.wait(DEADLINE)
        assert not opened_tier.close()
        assert sum(waited) <= 0.21
    monkeypatch.undo()
    assert opened_tier.close()
    faults(3)


def test_close_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, faults: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test ends: that is the bound. The disk is let go only after `close`."""
    roots = tmp_path / "a", tmp_path / "b"
    files = HangingFiles()
    capacity = capacity_of(SLOTS, 2)
    made = open_disk_tier([str(root) for root in roots], FINGERPRINT, SLOT, capacity, files=files)
    hung, real = made.drives[0].link, Link.close

    def close(link: Link, timeout: float) -> bool:
        """The bound passes sooner for the drive that hangs: the other one may be slow."""
        return real(link, min(timeout, 0.1) if link is hung else timeout)

    monkeypatch.setattr(Link, "close", close)
    client = Client(made)
    client.write(KEYS)
    kept = on_drive(client, 1)
    files.hang(roots[0])
    made.read(KEYS, client.buffers[: len(KEYS)], Priority.LOAD)
    assert files.hanging.wait(DEADLINE)
    assert not made.close()
    with opened(roots[1], slots=SLOTS) as other:  # that one was closed
        assert other.found(KEYS) == kept
    files.release()
    monkeypatch.undo()
    assert made.close()
    with opened(*roots, slots=SLOTS) as client:
        assert client.read(KEYS) == [DONE] * 30
    faults(1)
