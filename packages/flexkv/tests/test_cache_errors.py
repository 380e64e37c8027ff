# SPDX-License-Identifier: Apache-2.0
"""An error before each line that a cache executes over a real disk and a shared store: no wrong
byte, and afterwards no lease, no slot, no copy and no fetch that is lost."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_store import MemoryStore
from two_tiers import LONG, Node, content, names

import flexkv
from flexkv.client import Hold, Reset, Transfer, TransferEnd
from flexkv.eviction import POLICIES, RequestContext
from flexkv.host.board import CELLS
from flexkv.tiers.circuit import CircuitState
from flexkv.types.changes import Medium
from flexkv.types.mover import Direction, Status
from flexkv.types.presence import Presence
from packages.conftest import Clock
from packages.inside import (
    assert_no_fetch,
    assert_no_write,
    below_of,
    demoters_of,
    free_cells,
    index_of,
    is_recovering,
    sources_of,
    tier_figures,
)
from packages.inside_tiers import assert_no_batch, link_of, running_jobs
from packages.line_errors import InjectedError, LineErrors
from packages.seen_fetch import SeenFetch, see
from packages.tier_blocks import ready_blocks

SOURCE = Path(flexkv.__path__[0])
CODE = [SOURCE / name for name in ("cache.py", "index/pins.py", "host/board.py")] + [
    SOURCE / name for name in ("transfer", "tiers", "eviction")
]


class Story:
    """Calls of an engine, of which any may raise; each with new blocks."""

    def __init__(self, node: Node, errors: LineErrors) -> None:
        self.node = node
        self.errors = errors
        self.transfers: list[Transfer] = []
        self.fetches: list[SeenFetch] = []
        self._letters = (chr(each) for each in itertools.count(0x4E00))
        self._requests = itertools.count()

    def text(self, length: int) -> str:
        return "".join(itertools.islice(self._letters, length))

    def attempt(self, call: Callable[[], object]) -> object:
        """What a call returns; None if it raises."""
        self.errors.arm()
        try:
            return call()
        except InjectedError:
            return None
        finally:
            self.errors.disarm()

    def begin_store(self, text: str) -> Transfer | None:
        cache, keys = self.node.cache, names(text)
        transfer = self.attempt(lambda: cache.store(keys, cache.missing(keys)))
        if isinstance(transfer, Transfer):
            self.transfers.append(transfer)
            return transfer
        return None

    def begin_load(self, text: str) -> None:
        transfer = self.attempt(lambda: self.node.cache.load(names(text)))
        if isinstance(transfer, Transfer):
            self.transfers.append(transfer)

    def end_transfers(self, status: Status = Status.DONE) -> None:
        """Copy as the rank would, and poll."""
        board = self.node.arena.board
        for transfer in self.transfers:
            for key, slot in zip(transfer.keys, transfer.slots, strict=True):
                with self.node.arena.slot_view(slot) as view:
                    if transfer.direction is Direction.LOAD:
                        assert bytes(view) == content(key)
                    elif status is Status.DONE:
                        view[:] = content(key)
            board.report(transfer.cell, 0, status)
        self.transfers.clear()
        self.poll()

    def poll(self, times: int = 3) -> None:
        for _ in range(times):
            self.attempt(self.node.cache.poll)

    def store(self, text: str) -> None:
        self.begin_store(text)
        self.end_transfers()

    def request(self, text: str) -> None:
        """A request is scheduled and ends."""
        cache, name = self.node.cache, f"r{next(self._requests)}"
        context = RequestContext(len(text), 0, name)
        self.attempt(lambda: cache.record(names(text), context, names(text)))
        self.poll()
        self.attempt(lambda: cache.touch(names(text)))
        self.attempt(lambda: cache.ended(name, 7))

    def begin_fetch(self, text: str, *, queued: bool = False) -> SeenFetch | None:
        fetch = self.attempt(lambda: see(self.node.cache, names(text), queued=queued))
        if isinstance(fetch, SeenFetch):
            self.fetches.append(fetch)
            return fetch
        return None

    def end_fetches(self) -> None:
        for fetch in self.fetches:
            for block in fetch.blocks[: fetch.arrived]:
                assert block is not None
                with self.node.arena.slot_view(block.slot) as view:
                    assert bytes(view) == content(block.key)
            self.attempt(lambda each=fetch: self.node.cache.end_fetch(each))  # type: ignore[misc]
        self.fetches.clear()

    def fetch(self, text: str) -> None:
        fetch = self.begin_fetch(text)
        for _ in range(20):
            if fetch is None or fetch.done:
                break
            self.poll(1)
        self.begin_load(text[: 0 if fetch is None else fetch.arrived])
        self.end_transfers()
        self.end_fetches()

    def run(self) -> None:
        """All that an engine does with a cache."""
        cache, store = self.node.cache, self.node.store
        first, second, others = self.text(5), self.text(5), self.text(4)
        self.store(first)
        self.request(first)
        self.begin_load(first)
        self.end_transfers()
        self.attempt(lambda: cache.hold(Hold.PIN, names(first[:2]), "owner", 100.0))
        self.store(second)
        self.request(first)
        self.fetch(first)
        self.attempt(lambda: cache.unhold(Hold.PIN, "owner"))
        store.fill({key: content(key) for key in names(others)})
        self.attempt(lambda: cache.presence(names(others)))
        self.attempt(lambda: cache.query(names(others)))
        self.poll()
        self.begin_fetch(others, queued=True)
        for fetch in self.fetches:
            self.attempt(lambda each=fetch: cache.extend_fetch(each, raise_priority=True))  # type: ignore[misc]
        self.begin_fetch(others[:2])
        self.poll()
        self.end_fetches()
        self.fetch(second)
        self.begin_load(second)
        self.end_transfers(Status.FAILED)
        self.begin_store(self.text(3))
        self.end_transfers(Status.FAILED)
        transfer = self.begin_store(self.text(3))
        if transfer is not None:
            # An error before may keep slots until the cache has recovered: fewer blocks than asked.
            torn, later = transfer.id, range(1, len(transfer.keys))
            self.attempt(lambda: cache.end_transfer(torn, TransferEnd.DISCARD, later))
        self.end_transfers()
        transfer = self.begin_store(self.text(2))
        if transfer is not None:
            self.transfers.remove(transfer)
            cancelled = transfer.id
            self.attempt(lambda: cache.end_transfer(cancelled, TransferEnd.CANCEL))
        self.fetch(first)

    def rest(self) -> None:
        """Nothing is lost, and all goes on."""
        node, cache = self.node, self.node.cache
        for transfer_id in cache.status.under_way:  # those that an error kept from their caller
            cache.end_transfer(transfer_id, TransferEnd.CANCEL)
        cache.unhold(Hold.PIN, "owner")
        node.assert_at_rest()
        assert len(free_cells(node.arena.board)) == CELLS
        assert_no_fetch(cache)
        node.assert_own_bytes()
        assert_no_write(cache)
        assert cache.pinned_blocks == 0
        assert_no_batch(node.disk, node.remote)
        text = self.text(3)
        node.store_blocks(text)
        assert cache.lookup(names(text)) == 3
        node.assert_at_rest()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def start(**options: Any) -> Node:
        made.append(Node(tmp_path, MemoryStore(), slots=12, **options))
        return made[-1]

    yield start
    for node in made:
        gc.collect()  # errors keep frames, and those views of the arena
        node.close()


def test_hits_in_host_memory_go_on_while_the_cache_recovers(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(disk="write_through", remote="write_through")
    node.store_blocks("abc")
    node.store.fill({key: content(key) for key in names("xyz")})
    node.store.hanging = {"get"}
    fetch = node.begin("xyz")
    node.until(lambda: bool(node.store.gets) or running_jobs(link_of(node.remote)) > 0)
    with monkeypatch.context() as patch:
        patch.setattr(node.disk, "contains", _raising)
        with pytest.raises(InjectedError):
            node.cache.fetch(names("uvw"))
    node.cache.poll()
    assert node.cache.busy
    assert node.cache.store(names("d"), [0]) is None, "a read hangs, and keeps its slot"
    transfer = node.cache.load(names("abc"))
    assert transfer is not None
    node.store.release()
    node.until(lambda: fetch.done)
    assert fetch.arrived == 0
    blocks = ready_blocks(index_of(node.cache))
    assert [blocks[key].leases for key in transfer.keys] == [1, 1, 1]
    node.arena.board.report(transfer.cell, 0, Status.DONE)
    node.assert_at_rest()
    assert node.fetched("xyz") == "xyz"


def recover_beside_a_hung_call(node: Node, clock: Clock, call: str) -> None:
    """An error while so many calls of the shared store hang that the cache goes on without it."""
    node.until(lambda: call in node.store.waiting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.disk, "contains", _raising)
        with pytest.raises(InjectedError):
            node.cache.fetch(names("uvw"))
    node.cache.poll()
    assert node.cache.busy
    clock.skip(LONG + 1)
    node.until(lambda: not node.cache.busy)


def fill(node: Node, first: int = 0x4E00) -> None:
    """Let blocks of others go through all slots that the cache can give."""
    for start in range(first, first + 24, 4):
        node.store_blocks("".join(map(chr, range(start, start + 4))))


@pytest.mark.parametrize("again", [False, True])
def test_a_tier_whose_reads_hang_is_left_out_until_they_end(
    make: Callable[..., Node], clock: Clock, again: bool
) -> None:
    node = make(disk="write_through", remote="write_through")
    index, (_, remote) = index_of(node.cache), sources_of(node.cache)
    node.store_blocks("abc")
    node.store.fill({key: content(key) for key in names("xyz")})
    node.store.hanging = {"get"}
    fetch = node.begin("xyz")
    node.until(lambda: len(node.store.waiting) == 3)
    slots = {block.slot for block in below_of(node.cache).fetcher.reads.borrowed(remote)}
    assert len(slots) == 3
    recover_beside_a_hung_call(node, clock, "get")
    if again:
        node.cache.reset(Reset.RECOVER)
        node.until(lambda: not node.cache.busy)
    assert fetch.done
    assert fetch.arrived == 0
    assert node.cache.presence(names("xyz")) == [Presence.ABSENT] * 3
    circuits = {medium: figures.reads for medium, figures, *_ in tier_figures(node.cache)}
    assert circuits[Medium.MOONCAKE] == {CircuitState.OPEN: 1}
    fill(node)
    assert slots.isdisjoint(block.slot for block in index.blocks)
    assert node.fetched("abc") == "abc", "from the disk"
    node.store.release()
    node.until(lambda: not remote.left_out)
    node.assert_own_bytes()
    assert node.fetched("xyz") == "xyz"
    node.assert_at_rest()


@pytest.mark.parametrize("reset", [False, True])
def test_a_tier_whose_writes_hang_is_left_out_until_they_end(
    make: Callable[..., Node], clock: Clock, reset: bool
) -> None:
    node = make(disk="write_through", remote="write_through")
    (_, remote), (_, demoter) = sources_of(node.cache), demoters_of(node.cache)
    node.store.hanging = {"put"}
    node.begin_store("ab")
    node.until(lambda: len(node.store.waiting) == 2)
    slots = {block.slot: block.key for block in demoter.borrowed}
    assert sorted(slots.values()) == names("ab")
    # Else the disk would count as hung, too, once the time has passed.
    node.until(lambda: all(node.disk.contains(names("ab"))))
    recover_beside_a_hung_call(node, clock, "put")
    if reset:
        node.cache.reset(Reset.CLEAR)
    fill(node)
    here = {block.slot: block.key for block in index_of(node.cache).blocks}
    assert all(here.get(slot, key) == key for slot, key in slots.items())
    node.store.release()
    node.until(lambda: not remote.left_out)
    written = {name.rpartition("/")[2]: data for name, (_, data) in node.store.blocks.items()}
    assert written == {key.hex(): content(key) for key in names("ab")}
    node.store_blocks("cd")
    node.assert_at_rest()


def _raising(*_: object) -> list[bool]:
    raise InjectedError


@pytest.mark.parametrize("admission", ["write_through", "second_hit", "on_evict"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_before_any_line_loses_nothing(
    make: Callable[..., Node], admission: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("two_tiers.LRUPolicy", lambda: POLICIES[policy](12))
    node = make(disk=admission, remote=admission)
    errors = LineErrors(CODE, lambda *_: False)
    story = Story(node, errors)
    quiet = 0
    while quiet < 2:
        before = len(errors.hit)
        story.run()
        try:
            story.rest()
        except BaseException as error:
            error.add_note(f"after errors before {errors.hit[before:]}")
            raise
        quiet = 0 if len(errors.hit) > before else quiet + 1
    assert len(errors.hit) > 100


def test_an_error_before_any_line_beside_a_tier_that_hangs_loses_nothing(
    make: Callable[..., Node], clock: Clock
) -> None:
    node = make(disk="write_through", remote="write_through")
    cache, store = node.cache, node.store
    (_, remote) = sources_of(cache)
    errors = LineErrors(CODE, lambda *_: False)
    story = Story(node, errors)
    quiet = 0
    while quiet < 2:
        before = len(errors.hit)
        others = story.text(3)
        store.fill({key: content(key) for key in names(others)})
        store.hanging = {"get"}
        fetch = cache.fetch(names(others))
        node.until(lambda: len(store.waiting) == 3)
        cache.reset(Reset.RECOVER)
        story.poll()
        clock.skip(LONG + 1)
        story.poll()
        node.until(lambda: remote.left_out and not is_recovering(cache))
        story.store(story.text(3))
        cache.reset(Reset.RECOVER)
        story.poll()
        store.hanging = set()
        store.release_running()
        story.poll()
        node.until(lambda: not remote.left_out)
        assert fetch is not None
        cache.end_fetch(fetch)
        try:
            story.rest()
        except BaseException as error:
            error.add_note(f"after errors before {errors.hit[before:]}")
            raise
        quiet = 0 if len(errors.hit) > before else quiet + 1
    assert any(file.endswith("transfer/stack.py") for file, _ in errors.hit)
