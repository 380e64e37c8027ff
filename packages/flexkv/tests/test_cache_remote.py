# SPDX-License-Identifier: Apache-2.0
"""KVCache over a real disk and a tier that has to be asked, with real threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from memory_store import MemoryStore
from two_tiers import LONG, Node, content, names

from flexkv.client import Reset
from flexkv.tiers import device
from flexkv.tiers.circuit import FAILURES, CircuitState
from flexkv.transfer import sources
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence
from packages.conftest import Clock
from packages.inside import demoters_of, tier_figures
from packages.inside_tiers import link_of, running_jobs, store_of


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked again because a test was slow."""
    monkeypatch.setattr(sources, "LACKS_SECONDS", LONG)


Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path, store: MemoryStore, at_end: ExitStack) -> Make:
    roots = (tmp_path / str(number) for number in count())
    return lambda **options: at_end.enter_context(closing(Node(next(roots), store, **options)))


def fill(store: MemoryStore, text: str) -> None:
    store.fill({key: content(key) for key in names(text)})


def test_the_arena_is_registered_before_it_is_used(make: Make, store: MemoryStore) -> None:
    node = make()
    arena = node.arena
    assert store.registered == (arena.address + arena.spec.slots_offset, arena.spec.slots_bytes)


def test_what_other_engines_wrote_is_fetched_after_one_question(
    make: Make, store: MemoryStore
) -> None:
    fill(store, "abc")
    node = make()
    assert node.cache.presence(names("ab")) == [Presence.UNKNOWN] * 2
    assert store.finds == []
    assert node.fetched("abcde") == "abc"
    assert store.finds == [names("abcde")]
    assert node.cache.presence(names("ad")) == [Presence.HOST, Presence.ABSENT]
    # What was answered is not asked again.
    assert node.cache.fetch(names("abcde")) is None
    assert len(store.finds) == 1
    node.assert_at_rest()


def test_a_fetch_is_not_done_before_the_answer(make: Make, store: MemoryStore) -> None:
    fill(store, "ab")
    store.hanging = {"find"}
    node = make()
    fetch = node.begin("abc")
    node.cache.poll()
    assert (fetch.arrived, fetch.done, fetch.queried) == (0, False, Medium.MOONCAKE)
    assert fetch.awaited_keys == names("abc")
    joined = node.begin("ab")  # asks nothing more
    store.release()
    node.until(lambda: fetch.done and joined.done)
    assert (fetch.arrived, joined.arrived, store.finds) == (2, 2, [names("abc")])
    for each in (fetch, joined):
        node.cache.end_fetch(each)
    node.assert_at_rest()


def test_a_question_at_the_queue_answers_the_request_at_its_turn(
    make: Make, store: MemoryStore
) -> None:
    node = make()
    early = node.begin("abc", queued=True)
    node.until(lambda: early.done)
    assert node.cache.fetch(names("abc")) is None
    assert store.finds == [names("abc")]
    node.cache.end_fetch(early)
    node.assert_at_rest()


def test_what_is_not_answered_in_time_is_a_miss_and_counts_later(
    make: Make, store: MemoryStore, clock: Clock
) -> None:
    fill(store, "ab")
    store.hanging = {"find"}
    node = make(question_seconds=LONG / 2)
    fetch = node.begin("ab")
    node.until(lambda: store.waiting == ["find"])
    clock.skip(LONG / 2)
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (0, True)
    assert node.cache.counters.late_questions == 1
    assert node.cache.fetch(names("ab")) is None  # it is still being asked
    assert node.cache.presence(names("a")) == [Presence.ABSENT]
    node.cache.end_fetch(fetch)
    store.release()
    node.until(lambda: node.cache.presence(names("a")) == [Presence.BELOW])
    assert node.cache.counters.late_questions == 1
    assert node.fetched("ab") == "ab"
    assert store.finds == [names("ab")]
    node.assert_at_rest()


def test_a_question_that_is_dropped_at_its_deadline_counts_as_late(
    make: Make, store: MemoryStore, clock: Clock
) -> None:
    store.hanging = {"find"}
    node = make(question_seconds=LONG / 2)
    for number, name in enumerate("abcdefgh", 1):
        assert node.cache.query(names(name))
        node.until(partial(lambda number: len(store.waiting) == number, number))
    fetch = node.begin("z")
    clock.skip(LONG / 2)
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (0, True)
    assert node.cache.counters.late_questions == 9
    node.cache.end_fetch(fetch)
    store.release()
    node.assert_at_rest()
    assert node.cache.counters.late_questions == 9
    assert names("z") not in store.finds


def test_blocks_of_windows_are_asked_about_with_their_prefix(
    make: Make, store: MemoryStore
) -> None:
    node = make()
    assert node.cache.query(names("ab"), names("yz"))
    node.until(lambda: not node.cache.query(names("ab"), names("yz")))
    assert store.finds == [names("abyz")]


def test_a_question_without_a_fetch_is_polled_until_its_deadline(
    make: Make, store: MemoryStore, clock: Clock
) -> None:
    """An engine polls a cache that is busy."""
    node = make(question_seconds=LONG / 2)
    store.hanging = {"find"}
    assert not node.cache.busy
    assert node.cache.query(names("ab"))
    node.cache.poll()
    assert node.cache.busy
    clock.skip(LONG / 2)
    node.cache.poll()
    assert not node.cache.busy
    store.release()


def test_blocks_of_windows_do_not_depend_on_the_middle_of_a_prefix(
    make: Make, store: MemoryStore
) -> None:
    """The node has the first block, or asks about it already."""
    node = make()
    node.store_blocks("a")
    assert node.cache.query(names("ab"), names("z"))
    node.until(lambda: len(store.finds) == 2)
    store.hanging = {"find"}
    assert node.cache.query(names("s"))
    assert node.cache.query(names("st"), names("w"))
    store.release()
    node.until(lambda: len(store.finds) == 5)
    assert sorted(store.finds) == [names(each) for each in "bstwz"]
    node.assert_at_rest()


def test_answers_are_forgotten_after_a_while(make: Make, store: MemoryStore, clock: Clock) -> None:
    fill(store, "a")
    node = make()
    assert node.fetched("ab") == "a"
    fill(store, "b")
    assert node.fetched("ab") == "a"
    clock.skip(sources.LACKS_SECONDS)
    assert node.fetched("ab") == "ab"
    assert store.finds == [names("ab"), names("b")]
    node.assert_at_rest()


def test_of_many_answers_the_oldest_are_forgotten(
    make: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ANSWERS", 3)
    node = make()
    for name in "abcde":
        assert node.fetched(name) == ""
    assert node.cache.presence(names("abcde")) == [Presence.UNKNOWN] * 2 + [Presence.ABSENT] * 3


def test_blocks_of_one_prefix_come_from_where_each_is(make: Make, store: MemoryStore) -> None:
    node = make()
    node.put_on_disk("ab")
    fill(store, "bcdf")
    assert node.fetched("abcdef") == "abcd"
    # The disk is nearer: the store is asked only for what the disk lacks.
    assert store.finds == [names("cdef")]
    assert sorted(store.gets) == [[b"c"], [b"d"]]
    node.assert_at_rest()


def test_what_is_known_comes_while_the_rest_is_asked_for(make: Make, store: MemoryStore) -> None:
    node = make()
    node.put_on_disk("ab")
    fill(store, "c")
    store.hanging = {"find"}
    fetch = node.begin("abcd")
    node.until(lambda: fetch.arrived == 2)
    assert not fetch.done
    store.release()
    node.until(lambda: fetch.done)
    assert fetch.arrived == 3
    assert [fetch.media[key] for key in names("abc")] == [
        node.disk.medium,
        node.disk.medium,
        node.remote.medium,
    ]
    node.cache.end_fetch(fetch)
    node.assert_at_rest()


def damage_disk(root: Path) -> None:
    """Flip a byte of every block on disk."""
    (slab,) = root.glob("**/slab-*")
    with slab.open("r+b") as file:
        data = bytearray(file.read())
        data[::4096] = bytes(each ^ 1 for each in data[::4096])
        file.seek(0)
        file.write(data)


@pytest.mark.parametrize("has", ["ab", "a", ""])
def test_a_block_that_is_damaged_on_disk_comes_from_the_store(
    make: Make, store: MemoryStore, tmp_path: Path, has: str
) -> None:
    node = make()
    node.put_on_disk("ab")
    fill(store, has)
    damage_disk(tmp_path)
    assert node.fetched("ab") == has
    assert node.cache.counters.damaged_fetches == 2
    assert sorted(key for find in store.finds for key in find) == names("ab")
    node.assert_at_rest()


def test_a_store_that_has_lost_what_it_had_is_a_miss(make: Make, store: MemoryStore) -> None:
    fill(store, "abc")
    store.hanging = {"get"}
    node = make()
    fetch = node.begin("abc")
    node.until(lambda: fetch.queried is None)
    store.blocks.clear()
    store.release()
    node.until(lambda: fetch.done)
    assert fetch.arrived == 0
    node.cache.end_fetch(fetch)
    assert node.cache.presence(names("a")) == [Presence.ABSENT]
    node.assert_at_rest()


def test_a_damaged_block_of_the_store_is_no_hit(make: Make, store: MemoryStore) -> None:
    fill(store, "abc")
    store.damage(b"b")
    node = make()
    assert node.fetched("abc") == "a"
    assert node.cache.counters.damaged_fetches == 1
    node.assert_at_rest()


def test_a_hanging_store_costs_a_fetch_no_more_than_the_stall(
    make: Make, store: MemoryStore, clock: Clock
) -> None:
    fill(store, "bc")
    store.hanging = {"get"}
    node = make(stall_seconds=LONG / 2)
    node.put_on_disk("a")
    fetch = node.begin("abc")
    node.until(lambda: fetch.arrived == 1 and fetch.queried is None)
    clock.skip(LONG / 2 + 1)
    node.cache.poll()
    assert (fetch.arrived, fetch.done) == (1, True)
    assert node.cache.counters.stalled_fetches == 1
    node.cache.end_fetch(fetch)
    # The disk goes on beside it.
    assert node.fetched("a") == "a"
    store.release()
    node.assert_at_rest()


def test_blocks_that_a_hanging_disk_has_come_from_the_store(
    make: Make, store: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(stall_seconds=LONG / 2)
    node.put_on_disk("ab")
    fill(store, "abc")
    gate = hang(node, monkeypatch)
    fetch = node.begin("ab")
    clock.skip(LONG / 2 + 1)
    node.until(lambda: fetch.done)
    assert (fetch.arrived, node.cache.counters.stalled_fetches) == (2, 1)
    node.assert_own_bytes()
    # What comes at last from the disk goes nowhere.
    gate()
    node.cache.end_fetch(fetch)
    node.assert_at_rest()
    node.assert_own_bytes()


def test_a_new_fetch_leaves_what_hangs(
    make: Make, store: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(stall_seconds=LONG)
    node.put_on_disk("ab")
    fill(store, "abc")
    gate = hang(node, monkeypatch)
    hung = node.begin("ab")
    node.until(lambda: running_jobs(node.disk.drives[0].link) > 0)
    clock.skip(LONG + 1)
    assert node.fetched("abc") == "abc"
    node.until(lambda: hung.done)
    assert hung.arrived == 2
    gate()
    node.cache.end_fetch(hung)
    node.assert_at_rest()
    node.assert_own_bytes()


def test_a_block_whose_read_hangs_is_a_miss_at_once_and_all_others_come(
    make: Make, store: MemoryStore, clock: Clock
) -> None:
    fill(store, "abcd")
    store.hanging = {"get"}
    node = make(stall_seconds=LONG, disk=None)
    hung = node.begin("a")
    node.until(lambda: store.waiting == ["get"])
    store.hanging.clear()
    clock.skip(LONG + 1)
    node.until(lambda: hung.done)
    assert node.fetched("bcd") == "bcd"
    again = node.begin("a")
    assert (again.arrived, again.done) == (0, True)
    assert node.remote.readable
    for fetch in (hung, again):
        node.cache.end_fetch(fetch)
    store.release()
    node.assert_at_rest()
    assert node.fetched("a") == "a"


def hang(node: Node, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Reads of the disk wait until the returned function is called."""
    gate = threading.Event()
    disk_store: Any = store_of(node.disk.drives[0])
    read = disk_store.read

    def waiting(*args: Any) -> Any:
        gate.wait()
        return read(*args)

    monkeypatch.setattr(disk_store, "read", waiting)
    return gate.set


def test_what_is_fetched_from_the_store_is_written_to_disk_by_its_admission(
    make: Make, store: MemoryStore
) -> None:
    fill(store, "abc")
    node = make(disk="write_through")
    assert node.fetched("abc") == "abc"
    node.settle()
    assert node.on_disk("abcd") == "abc"
    other = make(disk="second_hit")
    assert other.fetched("abc") == "abc"
    other.settle()
    assert other.on_disk("abc") == ""
    other.cache.record(names("abc"))
    other.settle()
    assert other.on_disk("abc") == "abc"
    assert store.puts == []  # it has them


def test_each_tier_is_written_by_its_own_admission(make: Make, store: MemoryStore) -> None:
    node = make(disk="write_through", remote="second_hit")
    node.store_blocks("abc")
    assert (node.on_disk("abc"), store.keys()) == ("abc", [])
    node.cache.record(names("ab"))
    node.settle()
    assert store.keys() == names("ab")
    node.cache.record(names("ab"))
    node.settle()
    assert sorted(put for put in store.puts if put) == [[b"a"], [b"b"]]
    figures = {tier.medium: tier.counters for tier in tier_figures(node.cache)}
    assert figures[node.disk.medium].demoted_blocks == 3
    assert figures[node.remote.medium].demoted_blocks == 2


def test_a_block_leaves_once_every_tier_that_wants_it_has_it(
    make: Make, store: MemoryStore
) -> None:
    node = make(slots=8, disk="on_evict", remote="on_evict")
    store.hanging = {"put"}
    node.begin_store("ab")
    node.cache.poll()
    node.begin_store("uvwxyz")
    node.until(lambda: node.on_disk("ab") == "ab" and not demoters_of(node.cache)[0].busy)
    assert node.cache.lookup(names("ab")) == 2
    store.release()
    node.until(lambda: store.keys() == names("ab"))
    node.settle()
    assert node.cache.lookup(names("ab")) == 1
    node.assert_at_rest()


def test_a_clear_reaches_both_tiers(make: Make, store: MemoryStore) -> None:
    node = make(disk="write_through", remote="write_through")
    node.store_blocks("ab")
    store.hanging = {"find"}
    fetch = node.begin("abxy")
    node.cache.reset(Reset.CLEAR)
    assert (fetch.arrived, fetch.done) == (0, True)
    store.release()
    node.cache.end_fetch(fetch)
    node.settle()
    # An answer of before the clear says nothing.
    assert node.cache.presence(names("a")) == [Presence.UNKNOWN]
    assert node.fetched("ab") == ""
    node.until(lambda: store.renewed == 1)
    other = make()
    assert other.fetched("ab") == ""
    node.assert_at_rest()


def test_a_hanging_store_lets_the_disk_end(
    make: Make, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CLOSE_SECONDS", 0.05)
    fill(store, "x")
    node = Node(tmp_path / "own", store, disk="write_through")
    store.hanging = {"get"}
    fetch = node.begin("x")
    node.until(lambda: fetch.queried is None and running_jobs(link_of(node.remote)) > 0)
    node.begin_store("ab")
    assert not node.cache.close()
    store.release()
    second = Node(tmp_path / "own", MemoryStore())
    assert second.on_disk("ab") == "ab"
    second.close()


def test_an_open_circuit_makes_the_store_a_miss_at_once(make: Make, store: MemoryStore) -> None:
    store.broken = {"find"}
    node = make()
    for i in range(FAILURES):
        assert node.fetched(chr(ord("a") + i)) == ""
    assert node.cache.fetch(names("z")) is None
    ((_, disk, *_), (_, far, *_)) = tier_figures(node.cache)
    assert disk.reads == {CircuitState.CLOSED: 1}
    assert far.reads == {CircuitState.OPEN: 1}
    assert far.openings == 1
