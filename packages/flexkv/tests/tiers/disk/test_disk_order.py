# SPDX-License-Identifier: Apache-2.0
"""Which blocks leave a full disk first, in one process and over restarts."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from disk_blocks import (
    Client,
    names,
    opened,
)

from flexkv.tiers.job import Outcome
from packages.inside_tiers import last_generation, store_of

DONE = Outcome.DONE
OTHER = "cd" * 32


def in_use(client: Client, keys: list[bytes], writes: int) -> None:
    """Write `writes` other blocks; after every fourth the prefix `keys` is used."""
    for number in range(0, writes, 4):
        client.write(names(4, first=1000 + number))
        client.tier.touch(keys)
        client.settle()


def left_after_a_kill(root: Path, keys: list[bytes], writes: int) -> list[bytes]:
    """Those of `keys` that another process still has when it has written so many blocks more,
    where the one before it was killed now. Reads them."""
    after = root.with_name("after")
    shutil.copytree(root, after)
    with opened(after, slots=16) as client:
        client.write(names(writes, first=5000))
        found = client.found(keys)
        assert client.read(found) == [DONE] * len(found)
    shutil.rmtree(after)
    return found


def test_the_order_of_use_outlives_a_kill(tmp_path: Path) -> None:
    """Since it was written, the prefix was only ever touched."""
    keys = names(4)
    root = tmp_path / "before"
    with opened(root, slots=16) as client:
        client.write(keys)
        in_use(client, keys, writes=44)
        # The wrap is 16 blocks, and records are half a wrap old at most.
        assert left_after_a_kill(root, keys, 4) == keys
        assert left_after_a_kill(root, keys, 16) == []
        # What is not in use any more leaves, and its end before its beginning.
        client.write(names(12, first=3000))
        assert left_after_a_kill(root, keys, 0) == keys
        client.write(names(2, first=4000))
        assert left_after_a_kill(root, keys, 0) == keys[:2]


def test_what_a_prefix_builds_on_is_recorded_as_used_later(tmp_path: Path) -> None:
    """Its beginning was written later than its end, as where it was lost."""
    keys = names(4)
    root = tmp_path / "before"
    with opened(root, slots=16) as client:
        client.write(keys[2:])
        client.write(names(6, first=1000))
        client.write(keys[:2])
        client.write(names(1, first=2000))
        client.tier.touch(keys)
        client.settle()
        assert left_after_a_kill(root, keys, 14) == keys[:2]


def test_records_are_written_again_only_as_blocks_are_written(tmp_path: Path) -> None:
    with opened(tmp_path, slots=16) as client:
        client.write(names(16))
        (drive,) = client.tier.drives
        client.tier.touch(names(16))
        generation = last_generation(drive)
        for _ in range(100):
            client.tier.touch(names(16))
        assert last_generation(drive) == generation
        client.write(names(9, first=100))
        client.tier.touch(names(7))
        assert last_generation(drive) == generation + 9 + 7


def test_what_is_forgotten_while_its_record_is_renewed_does_not_return(tmp_path: Path) -> None:
    keys = names(16)
    with opened(tmp_path, slots=16) as client:
        client.write(keys[:4])
        client.write(keys[4:])
        client.tier.touch(keys[:4])
        client.delete(keys[:2])
    with opened(tmp_path, slots=16) as client:
        assert client.found(keys) == keys[2:]


def test_a_record_that_cannot_be_renewed_costs_nothing_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = names(16)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken by the test")

    with opened(tmp_path, slots=16) as client:
        client.write(keys)
        (drive,) = client.tier.drives
        monkeypatch.setattr(store_of(drive), "write_record", refuse)
        client.tier.touch(keys)
        client.settle()
        monkeypatch.undo()
        assert client.read(keys) == [DONE] * 16
        assert drive.index.usable_slots == drive.index.num_slots
    with opened(tmp_path, slots=16) as client:
        assert client.read(keys) == [DONE] * 16


def test_the_end_of_a_prefix_leaves_first(tmp_path: Path) -> None:
    with opened(tmp_path, slots=8) as client:
        client.write(names(8))
        client.write([b"new", b"newer"])
        assert client.found(names(8)) == names(6)


def test_a_prefix_longer_than_the_disk_keeps_its_beginning_and_others_are_written(
    tmp_path: Path,
) -> None:
    keys = names(14)
    with opened(tmp_path, slots=8) as client:
        for start in range(0, 8, 4):
            assert (
                client.wait(client.begin_write(keys[start : start + 4], [None, *keys][start:]), 4)
                == [DONE] * 4
            )
        client.write([b"other"])
        assert client.found(keys) == keys[:7]
        new = [*keys[7:9], b"new"]
        ticket = client.begin_write(new, [keys[6], keys[7], None])
        assert client.wait(ticket, 3) == [Outcome.DROPPED, Outcome.DROPPED, DONE]
        assert client.found([*keys, b"other", b"new"]) == [*keys[:6], b"other", b"new"]


@pytest.mark.parametrize("step", [1, -1])
def test_the_end_of_a_prefix_leaves_first_after_a_restart_too(tmp_path: Path, step: int) -> None:
    """Whether it lies in slots that go up or down: those freed last are taken first."""
    with opened(tmp_path, slots=8) as client:
        client.write(names(8, first=100))
        for key in names(8, first=100)[::step]:
            client.delete([key])
            client.settle()
        client.write(names(8))
    with opened(tmp_path, slots=8) as client:
        client.write([b"new", b"newer"])
        assert client.found(names(8)) == names(6)
