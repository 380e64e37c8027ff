# SPDX-License-Identifier: Apache-2.0
"""What a disk tier was told to forget stays forgotten, over restarts too."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_blocks import (
    bytes_of,
    names,
    opened,
)
from faults.faulty_files import Fault, FaultyFiles
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.tiers.job import Outcome, Priority
from packages.inside_tiers import store_of

DONE = Outcome.DONE


def test_deleted_blocks_are_not_found_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        client.write(names(60))
        client.delete(names(50))
        assert client.found(names(60)) == names(10, first=50)
        # Closed at once: most of the erasing is still to be done.
    with opened(tmp_path) as client:
        assert client.found(names(60)) == names(10, first=50)
        client.delete([*names(3, first=50), b"absent"])
        client.settle()
        assert client.write(names(50)) == [DONE] * 50
    with opened(tmp_path) as client:
        assert client.found(names(60)) == [*names(50), *names(7, first=53)]
        assert set(client.read(client.found(names(60)))) == {DONE}


def test_a_block_that_was_evicted_for_nothing_does_not_return(tmp_path: Path) -> None:
    """Its record is on disk until the slot is written, which here never happens."""
    with opened(tmp_path, slots=8) as client:
        client.write(names(8))
        client.tier.cancel(client.begin_write(names(8, first=100)))
        client.settle()
        left = client.found(names(108))
        client.delete(names(108))
        assert client.found(names(108)) == []
    with opened(tmp_path, slots=8) as client:
        assert client.found(names(108)) == [], left


def test_a_failed_erasure_is_made_up_for(tmp_path: Path) -> None:
    files = FaultyFiles(1, 0.0, Fault.EIO)
    with opened(tmp_path, files=files) as client:
        client.write(names(20))
        files.rate = 1.0
        client.delete(names(10))
        client.settle()
        files.rate = 0.0
        assert files.counts[Fault.EIO] >= 10
        assert client.found(names(20)) == names(10, first=10)
        client.write(names(3, first=100))
    with opened(tmp_path) as client:
        assert client.found(names(103)) == [*names(10, first=10), *names(3, first=100)]
        assert set(client.read(client.found(names(103)))) == {DONE}


def test_of_two_records_of_one_block_the_older_does_not_return(tmp_path: Path) -> None:
    """As a kill between an eviction and the write it was for may leave them."""
    with opened(tmp_path, slots=8) as client:
        client.write(names(8))
        (store,) = [store_of(drive) for drive in client.tier.drives]
        (buffer,) = client.buffers[:1]
        buffer[:] = bytes_of(names(1)[0])
        slot = store.index.lease(names(1)[0])
        store.write((slot or 0) ^ 1, names(1), [99], store.seal, [buffer])
    with opened(tmp_path, slots=8) as client:
        assert client.read(names(1)) == [DONE]
        assert len(client.found(names(8))) == 7
        client.delete(names(1))
    with opened(tmp_path, slots=8) as client:
        assert client.found(names(1)) == []


@pytest.mark.parametrize("moment", ["idle", "writing", "reading", "twice", "emptied"])
def test_clear_leaves_nothing_for_the_next_process(tmp_path: Path, moment: str) -> None:
    with opened(tmp_path) as client:
        client.write(names(30))
        tickets = []
        if moment == "writing":
            tickets.append((client.begin_write(names(30, first=30)), 30))
        if moment == "reading":
            ticket = client.tier.read(names(30), client.buffers[:30], Priority.LOAD)
            tickets.append((ticket, 30))
        client.tier.clear()
        if moment == "twice":
            client.tier.clear()
        if moment == "emptied":
            client.tier.empty()
        assert client.found(names(60)) == []
        for ticket, count in tickets:
            client.wait(ticket, count)
        assert client.found(names(60)) == []
        client.salt = b"new weights"
        assert client.write(names(20)) == [DONE] * 20
        assert client.read(names(20)) == [DONE] * 20
    with opened(tmp_path, salt=b"newer weights") as client:
        assert client.found(names(60)) == []
        client.write(names(20))
    with opened(tmp_path, salt=b"newer weights") as client:
        assert client.read(names(20)) == [DONE] * 20


@pytest.mark.parametrize("moment", ["idle", "writing", "reading", "twice"])
def test_an_emptied_folder_has_later_blocks_for_the_next_process(
    tmp_path: Path, moment: str
) -> None:
    with opened(tmp_path) as client:
        client.write(names(30))
        tickets = []
        if moment == "writing":
            tickets.append((client.begin_write(names(30, first=30)), 30))
        if moment == "reading":
            ticket = client.tier.read(names(30), client.buffers[:30], Priority.LOAD)
            tickets.append((ticket, 30))
        client.tier.empty()
        if moment == "twice":
            client.tier.empty()
        assert client.found(names(60)) == []
        for ticket, count in tickets:
            client.wait(ticket, count)
        assert client.found(names(60)) == []
        assert client.write(names(20)) == [DONE] * 20
    with opened(tmp_path) as client:
        assert client.found(names(60)) == names(20)
        assert client.read(names(20)) == [DONE] * 20


STEPS = st.tuples(
    st.sampled_from(["write", "write", "read", "delete", "clear", "empty", "reopen"]),
    st.lists(st.integers(0, 30), max_size=12, unique=True),
    st.integers(1, 24),
)


@settings(max_examples=40)
@given(st.lists(STEPS, max_size=25))
def test_no_history_yields_what_was_forgotten(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int], int]]
) -> None:
    """Random histories over restarts and capacities, beside the set of what may be found."""
    root = tmp_path_factory.mktemp("history")
    runs: list[list[tuple[str, list[int], int]]] = [[]]
    for step in steps:
        runs[-1].append(step)
        if step[0] == "reopen":
            runs.append([])
    allowed: set[bytes] = set()
    everything = names(31)
    slots, salt = 12, b""
    for run in runs:
        with opened(root, slots=slots, salt=salt) as client:
            cleared = False
            for action, numbers, size in run:
                keys = [everything[i] for i in numbers]
                if action == "write":
                    client.write(keys)
                    allowed |= set(keys)
                elif action == "read":
                    client.read(client.found(keys))
                elif action == "delete":
                    client.delete(keys)
                    allowed -= set(keys)
                elif action == "clear":
                    client.tier.clear()
                    client.salt += b"+"
                    allowed, cleared = set(), True
                elif action == "empty":
                    client.tier.empty()
                    allowed = set()
                elif action == "reopen":
                    slots = size
                assert set(client.found(everything)) <= allowed
            found = client.found(everything)
            assert client.read(found) == [DONE] * len(found)
            salt = client.salt
        if cleared:  # then the next process finds nothing
            allowed, salt = set(), salt + b"."
