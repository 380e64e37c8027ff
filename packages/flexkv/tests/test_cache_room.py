# SPDX-License-Identifier: Apache-2.0
"""Host memory full of blocks that wait for a lower tier: who gets a slot all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from memory_store import MemoryStore
from two_tiers import Node, content, names

from flexkv.client import TransferEnd
from flexkv.types.mover import Status
from packages.inside import demoters_of, index_of
from packages.inside_tiers import (
    allow_one_write,
    ended_jobs,
    link_of,
    running_jobs,
    store_of,
    waiting_writes,
)
from packages.patience import wait_until
from packages.tier_blocks import ready_blocks, writing_blocks

FULL = "stuvwxyz"
"""A prefix that fills host memory."""


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path, store: MemoryStore, at_end: ExitStack) -> Make:
    """Makes a node with blocks a to d on disk, over a store whose writes hang, one at a time."""

    def start(**options: Any) -> Node:
        node = Node(tmp_path, store, threads=1, **({"remote": "write_through"} | options))
        at_end.callback(node.close)
        node.put_on_disk("abcd")
        store.puts.clear()
        store.hanging = {"put"}
        return node

    return start


def fill(node: Node, text: str = FULL) -> None:
    """Store a prefix, whose first block is being written to the store from then on."""
    node.begin_store(text)
    node.cache.poll()  # takes the end of the store
    node.cache.poll()  # begins the writes
    wait_until(lambda: running_jobs(link_of(node.remote)) > 0)


def held(node: Node) -> str:
    """The blocks that cannot be evicted, in the order of their names."""
    ready = ready_blocks(index_of(node.cache))
    return "".join(sorted(key.decode() for key, block in ready.items() if block.leases))


def dropped(node: Node) -> int:
    return node.cache.counters.dropped_demotions


def written(store: MemoryStore) -> str:
    return "".join(key.decode() for put in store.puts for key in put)


def test_a_waiting_request_gets_the_slots_of_writes_that_have_not_begun(
    make: Make, store: MemoryStore
) -> None:
    node = make()
    fill(node)
    assert held(node) == FULL
    assert node.fetched("abcd") == "abcd"
    assert node.cache.lookup(names(FULL)) == 4, "the end of the other prefix went first"
    assert dropped(node) == 7, "all but the write that runs"
    store.release()
    node.assert_at_rest()
    assert written(store) == "s"


def test_a_queued_request_takes_no_slot_from_a_write(make: Make) -> None:
    node = make()
    fill(node)
    early = node.begin("abcd", queued=True)
    assert early.stop == 0
    assert (held(node), dropped(node)) == (FULL, 0)
    node.cache.end_fetch(early)


def test_a_store_of_the_engine_gets_such_slots_too(make: Make, store: MemoryStore) -> None:
    node = make()
    fill(node)
    transfer = node.cache.store(names("mnop"), range(4))
    assert transfer is not None
    assert transfer.keys == names("mnop")
    node.arena.board.report(transfer.cell, 0, Status.FAILED)
    store.release()
    node.assert_at_rest()


def test_the_newest_writes_are_given_up_and_no_more_than_needed(
    make: Make, store: MemoryStore
) -> None:
    node = make()
    fill(node, "wxyz")
    fill(node, "mnop")
    assert node.fetched("abc") == "abc"
    assert dropped(node) == 4
    assert node.cache.lookup(names("mnop")) == 1
    assert held(node) == "wxyz"
    store.release()
    node.assert_at_rest()
    assert written(store) == "wxyz"


def test_blocks_give_way_before_their_writes_are_queued(make: Make, store: MemoryStore) -> None:
    """The first poll queues half of 40 blocks, and the others wait for the next."""
    node = make(slots=40)
    many = "".join(map(chr, range(0x41, 0x41 + 26))) + "0123456789mnop"
    fill(node, many)
    assert [block.key for block in waiting_writes(demoters_of(node.cache)[1])] == names(many[20:])
    assert node.fetched("abcd") == "abcd"
    assert dropped(node) == 16
    store.release()
    node.assert_at_rest()
    assert written(store) == many[:24]


def test_a_slot_that_the_arena_has_costs_no_write(make: Make, store: MemoryStore) -> None:
    node = make()
    fill(node, "wxyz")
    assert node.fetched("abcd") == "abcd"
    transfer = node.cache.store(names("qr"), range(2))
    assert transfer is not None
    node.cache.end_transfer(transfer.id, TransferEnd.CANCEL)
    assert dropped(node) == 0
    store.release()
    node.assert_at_rest()
    assert written(store) == "wxyz"


def test_a_block_without_its_predecessor_takes_no_slot_from_a_write(make: Make) -> None:
    node = make()
    fill(node, "uvwxyz")
    assert node.cache.store(names("mn"), [1]) is None
    assert (held(node), dropped(node)) == ("uvwxyz", 0)


def test_a_prefix_larger_than_host_memory_gets_to_disk_whole(make: Make) -> None:
    node = make(disk="write_through", remote="second_hit")
    node.store_blocks(FULL)
    for text in ("zijkl", "lmnop"):  # each behind the last block before
        node.store_blocks(text)
    assert node.on_disk(FULL + "ijklmnop") == FULL + "ijklmnop"
    node.assert_own_bytes()
    node.assert_at_rest()


def test_only_blocks_behind_one_that_a_tier_has_take_slots_of_their_prefix(make: Make) -> None:
    node = make(disk="write_through", remote="second_hit")
    node.store_blocks(FULL)
    node.disk.remove(names("z"))
    assert node.cache.store(names("zij"), [1, 2]) is None
    demoters_of(node.cache)[0].offer(names("z"))
    node.settle()
    transfer = node.cache.store(names("zijgh"), range(1, 5), (3,))
    assert transfer is not None
    assert transfer.keys == names("ijgh")
    parents = {key: each.parent_key for key, each in writing_blocks(index_of(node.cache)).items()}
    assert parents == {b"i": None, b"j": b"i", b"g": None, b"h": b"g"}
    node.cache.end_transfer(transfer.id, TransferEnd.CANCEL)
    node.assert_at_rest()


@pytest.fixture
def hanging(make: Make) -> Iterator[tuple[Node, threading.Event]]:
    """A node with blocks a to d on disk whose writes hang until the event, one at a time."""
    node = make(disk="write_through", remote="second_hit")
    drive: Any = node.disk.drives[0]
    allow_one_write(drive.link)
    gate, write = threading.Event(), store_of(drive).write

    def waiting(*args: Any, **named: Any) -> Any:
        gate.wait()
        return write(*args, **named)

    store_of(drive).write = waiting
    yield node, gate
    gate.set()


def test_a_store_of_the_engine_gets_no_slot_of_a_write_to_a_disk(
    hanging: tuple[Node, threading.Event],
) -> None:
    node, gate = hanging
    node.begin_store(FULL)
    node.cache.poll()
    assert node.cache.store(names("mnop"), range(4)) is None
    assert (held(node), dropped(node)) == (FULL, 0)
    gate.set()
    node.assert_at_rest()
    assert node.on_disk(FULL) == FULL


def test_a_waiting_request_gets_the_slots_of_writes_to_a_disk(
    hanging: tuple[Node, threading.Event],
) -> None:
    """Else it would compute what the disk has."""
    node, gate = hanging
    node.begin_store(FULL[:4])
    node.cache.poll()
    node.cache.poll()
    wait_until(lambda: running_jobs(node.disk.drives[0].link) > 0)
    node.begin_store(FULL[4:])
    node.cache.poll()
    fetch = node.begin("abcd")
    assert (fetch.stop, held(node), dropped(node)) == (4, FULL[:4], 4)
    gate.set()
    node.until(lambda: fetch.done)
    assert node.cache.lookup(names("abcd")) == 4
    node.cache.end_fetch(fetch)
    node.assert_at_rest()
    node.assert_own_bytes()
    assert node.on_disk(FULL) == FULL[:4]


def test_a_read_that_ends_meanwhile_reaches_its_request(make: Make, store: MemoryStore) -> None:
    node = make()
    store.fill({b"e": content(b"e")})
    store.hanging = {"get", "put"}
    fetch = node.begin("e")
    node.until(lambda: fetch.queried is None)
    fill(node, FULL[:7])
    wait_until(lambda: "get" in store.waiting)
    store.release_running()
    wait_until(lambda: ended_jobs(link_of(node.remote)) > 0)
    other = node.begin("abcd")
    assert (dropped(node), other.stop, fetch.done) == (6, 4, False)
    node.until(lambda: fetch.done and other.done)
    assert (fetch.arrived, other.arrived) == (1, 4)
    for each in (fetch, other):
        node.cache.end_fetch(each)
    store.release()
    node.assert_at_rest()
