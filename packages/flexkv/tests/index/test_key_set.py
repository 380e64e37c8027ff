# SPDX-License-Identifier: Apache-2.0
"""The set of keys that other processes read."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.index.key_set import KeySet, key_set, key_set_bytes


def key(number: int) -> bytes:
    return struct.pack("<Q", number) * 4


def keys(numbers: Sequence[int]) -> list[bytes]:
    return [key(each) for each in numbers]


def empty(size: int) -> KeySet:
    return key_set(bytearray(key_set_bytes(size)), is_owner=True)


CHANGES = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 60), max_size=12)))


@given(CHANGES)
def test_it_has_what_was_added_and_not_removed(changes: list[tuple[bool, list[int]]]) -> None:
    """With 61 keys in 128 places, many are not in their home."""
    memory = bytearray(key_set_bytes(61))
    owner, reader = key_set(memory, is_owner=True), key_set(memory, is_owner=False)
    model: set[int] = set()
    for adds, numbers in changes:
        if adds:
            assert owner.add(keys(numbers)) == 0
            model.update(numbers)
        else:
            owner.remove(keys(numbers))
            model.difference_update(numbers)
        expected = [number in model for number in range(61)]
        assert owner.contains(keys(range(61))) == expected
        assert reader.contains(keys(range(61))) == expected
        assert reader.lookup(keys(range(61))) == [*expected, False].index(False)
        assert len(owner) == len(model)


def test_it_takes_no_more_keys_than_fit() -> None:
    made = empty(1000)
    assert made.add(keys(range(1000))) == 0
    refused = made.add(keys(range(1000, 9000)))
    found = made.contains(keys(range(9000)))
    assert found[:1000] == [True] * 1000
    assert refused == 9000 - found.count(True) > 0
    made.remove(keys(range(1000)))
    assert made.contains(keys(range(1000))) == [False] * 1000
    assert made.add(keys(range(1000))) == 0


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_small_sets(size: int) -> None:
    made = empty(size)
    assert made.contains(keys(range(4))) == [False] * 4
    assert made.add(keys(range(size))) == 0
    assert made.contains(keys(range(size))) == [True] * size


def test_readers_see_whether_it_is_complete() -> None:
    memory = bytearray(key_set_bytes(10))
    owner = key_set(memory, is_owner=True)
    reader = key_set(memory, is_owner=False)
    assert not reader.is_complete
    owner.is_complete = True
    assert reader.is_complete
    owner.is_complete = False
    assert not reader.is_complete


def test_only_the_owner_changes_it() -> None:
    memory = bytearray(key_set_bytes(10))
    key_set(memory, is_owner=True)
    reader = key_set(bytes(memory), is_owner=False)
    with pytest.raises(TypeError, match="its owner"):
        reader.add([key(1)])
    with pytest.raises(TypeError, match="its owner"):
        reader.remove([key(1)])
    with pytest.raises(TypeError, match="its owner"):
        reader.is_complete = True


@pytest.mark.parametrize("change", [1, -1, 8, -8])
def test_memory_of_another_size_is_refused(change: int) -> None:
    size = key_set_bytes(10) + change
    with pytest.raises(ValueError, match="no set of keys"):
        key_set(bytearray(size), is_owner=True)
    with pytest.raises(ValueError, match="no set of keys"):
        key_set(bytearray(size), is_owner=False)


@pytest.mark.parametrize("place", [0, 8, 16])
def test_memory_of_another_layout_is_refused(place: int) -> None:
    memory = bytearray(key_set_bytes(10))
    key_set(memory, is_owner=True)
    memory[place] ^= 1
    with pytest.raises(ValueError, match="no set of keys"):
        key_set(memory, is_owner=False)


def _read(memory: mmap.mmap, pipe: Connection) -> None:
    """Reports how often keys that stay were found and not found, and how often keys that nobody
    added were."""
    reader = key_set(memory, is_owner=False)
    staying, never = keys(range(500)), keys(range(1 << 40, (1 << 40) + 500))
    found = looks = wrong = 0
    while not pipe.poll():
        looks += len(staying)
        found += sum(reader.contains(staying))
        wrong += sum(reader.contains(never))
        if looks == len(staying):
            pipe.send("begun")
    pipe.send((looks, found, wrong))


def test_another_process_reads_while_it_changes() -> None:
    memory = mmap.mmap(-1, key_set_bytes(1000))
    owner = key_set(memory, is_owner=True)
    owner.add(keys(range(500)))
    context = get_context("fork")
    pipe, others_pipe = context.Pipe()
    process = context.Process(target=_read, args=(memory, others_pipe))
    process.start()
    assert pipe.recv() == "begun"
    for turn in range(3000):
        passing = keys(range(1000 + turn, 1500 + turn))
        assert owner.add(passing) == 0
        owner.remove(passing)
    pipe.send("end")
    looks, found, wrong = pipe.recv()
    process.join()
    assert wrong == 0
    # A key that moves at this moment may be missed.
    assert found > looks * 0.9
    assert owner.contains(keys(range(500))) == [True] * 500
    assert len(owner) == 500
