# SPDX-License-Identifier: Apache-2.0
"""Several schedulers use one cache; nothing that they call waits for the service."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexkv.client import Hold, Reset, Transfer, TransferEnd
from flexkv.host.board import CELLS
from flexkv.service import line
from flexkv.service import messages as wire
from flexkv.service.line import MOST_WAITING, READ, SENT
from flexkv.service.page import PUBLISHED
from flexkv.service.state import clear_pools
from flexkv.types.changes import Changes, Medium
from flexkv.types.mover import Status
from flexkv.types.presence import Presence
from packages.flexkv.tests.service.served import Scheduler, Service, keys_of, until
from packages.inside import (
    bell_of,
    free_cells,
    index_of,
    line_of,
    reader_of,
    stores_of,
    waiting_messages,
    waiting_packets,
)

Attach = Callable[..., Scheduler]


def ordered(scheduler: Scheduler, keys: list[bytes]) -> Transfer:
    """A store that no rank has copied yet."""
    transfer = scheduler.cache.store(keys, range(len(keys)))
    assert transfer is not None
    return transfer


def test_blocks_count_as_stored_once_they_are_published(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_SILENT_SECONDS", 0.0)
    one = attach(service)
    service.stop()
    transfer = ordered(one, keys_of("a", 3))
    one.cache.end_transfer(transfer.id, TransferEnd.DISCARD, [2])
    one.copy(transfer)
    until(lambda: one.cache.status.is_silent, one.cache.poll)
    assert one.cache.status.publishing == {transfer.id}
    assert not one.cache.counters.stored_blocks
    service.wake()
    until(lambda: not one.cache.status.publishing, one.cache.poll)
    assert one.cache.counters.stored_blocks == 2
    assert one.cache.counters.stored_bytes == 2 * 4096
    assert one.cache.lookup(keys_of("a", 3)) == 2


def test_what_one_stores_another_loads(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    keys = keys_of("a", 6)
    assert other.cache.lookup(keys) == 0
    assert one.store(keys) == keys
    assert other.cache.lookup([*keys, b"x"]) == 6
    assert other.cache.presence([keys[0], b"x"]) == [Presence.HOST, Presence.ABSENT]
    assert other.cache.missing([*keys, b"x"]) == [6]
    assert other.load(keys)
    assert other.store(keys) == []
    until(service.accounted)


def test_a_block_is_found_once_all_ranks_have_copied_it(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    keys = keys_of("a", 3)
    transfer = ordered(one, keys)
    one.cache.poll()
    assert one.cache.missing(keys) == [], "it would be stored twice"
    assert one.cache.store(keys, range(3)) is None
    assert other.cache.lookup(keys) == one.cache.lookup(keys) == 0
    one.copy(transfer)
    one.settle()
    assert other.cache.lookup(keys) == 3


def test_a_failed_store_publishes_nothing(service: Service, attach: Attach) -> None:
    one = attach(service)
    transfer = ordered(one, keys_of("a", 3))
    one.copy(transfer, Status.FAILED)
    (ended,) = one.cache.poll()
    assert not ended.done
    one.settle()
    assert one.cache.lookup(keys_of("a", 3)) == 0
    assert one.store(keys_of("a", 3)) == keys_of("a", 3)
    until(service.accounted)


def test_blocks_follow_those_that_they_build_on(service: Service, attach: Attach) -> None:
    """The second store ends first."""
    one = attach(service)
    keys = keys_of("a", 6)
    first = ordered(one, keys[:3])
    second = one.cache.store(keys, range(3, 6))
    assert second is not None
    one.copy(second)
    for _ in range(20):
        one.cache.poll()
        time.sleep(0.001)
    assert one.cache.lookup(keys[3:]) == 0
    one.copy(first)
    one.settle()
    assert one.cache.lookup(keys) == 6


def test_a_block_without_its_predecessor_is_not_stored(service: Service, attach: Attach) -> None:
    one = attach(service)
    keys = keys_of("a", 4)
    transfer = one.cache.store(keys, [2, 3])
    assert transfer is None
    assert one.cache.counters.refused_blocks > 0


def test_blocks_of_several_prefixes_are_stored_at_once(service: Service, attach: Attach) -> None:
    """Some go on from blocks that are there, some from a store under way, some from nothing; one is
    named twice."""
    one, other = attach(service), attach(service)
    known, new, lone = keys_of("known", 2), keys_of("new", 3), keys_of("lone", 3)
    under_way = keys_of("under way", 2)
    one.store(known[:1])
    first = ordered(one, under_way[:1])
    keys = [*known, *new, *lone, *under_way, new[0]]
    transfer = one.cache.store(keys, [1, 2, 3, 4, 6, 7, 9, 10], [0, 2, 10])
    assert transfer is not None
    assert list(transfer.keys) == [known[1], *new, under_way[1]]
    one.copy(transfer)
    one.copy(first)
    one.settle()
    for prompt in (known, new, under_way):
        assert other.cache.lookup(prompt) == len(prompt)
        assert other.load(prompt)
    assert other.cache.lookup(lone[1:]) == 0
    until(service.accounted)


def test_discarded_blocks_are_not_published(service: Service, attach: Attach) -> None:
    one = attach(service)
    keys = keys_of("a", 5)
    transfer = ordered(one, keys)
    one.cache.end_transfer(transfer.id, TransferEnd.DISCARD, [3])
    one.copy(transfer)
    one.settle()
    assert one.cache.lookup(keys) == 3
    assert one.cache.lookup(keys[4:]) == 0, "it builds on a block that was discarded"
    until(service.accounted)


def test_a_cancelled_transfer_leaves_nothing(service: Service, attach: Attach) -> None:
    one = attach(service)
    keys = keys_of("a", 3)
    one.cache.end_transfer(ordered(one, keys).id, TransferEnd.CANCEL)
    assert one.store(keys) == keys
    load = one.cache.load(keys)
    assert load is not None
    one.cache.end_transfer(load.id, TransferEnd.CANCEL)
    assert reader_of(one.cache).held == 0
    one.settle()
    until(service.accounted)


def test_held_stores_wait_for_the_word_of_the_engine(service: Service, attach: Attach) -> None:
    one = attach(service)
    keys = keys_of("a", 2)
    transfer = one.cache.store(keys, range(2), held=True)
    assert transfer is not None
    one.copy(transfer)
    for _ in range(20):
        one.cache.poll()
    assert one.cache.lookup(keys) == 0
    one.cache.end_transfer(transfer.id, TransferEnd.CONFIRM)
    one.settle()
    assert one.cache.lookup(keys) == 2


def test_a_long_prompt_takes_several_messages(
    make_service: Callable[..., Service], attach: Attach
) -> None:
    count = 3 * wire.MOST_KEYS
    service = make_service(8 * count)
    one = attach(service, step_blocks=2 * count)
    until(lambda: len(stores_of(one.cache).free) >= count, one.cache.poll)
    keys = [key.ljust(96, b"-") for key in keys_of("a", count)]
    assert one.store(keys) == keys
    one.cache.record(keys[:7], prompt=keys)
    one.cache.touch(keys)
    one.cache.hold(Hold.PIN, keys, "me", 100.0)
    one.settle()
    assert one.cache.lookup(keys) == count
    until(lambda: service.pool.cache.pinned_blocks == count)
    assert one.cache.unhold(Hold.PIN, "me")
    assert not one.cache.unhold(Hold.PIN, "me")
    one.settle()
    until(lambda: service.pool.cache.pinned_blocks == 0)


def test_granted_slots_are_a_share_and_come_back(
    make_service: Callable[..., Service], attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexkv.service import attached

    monkeypatch.setattr(attached, "_IDLE_SECONDS", 1e9)
    monkeypatch.setattr(attached, "_IDLE_SLOTS", 2)
    monkeypatch.setattr(attached, "_IDLE_SHARE", 64)
    service = make_service(64)
    one = attach(service, step_blocks=1000)
    assert len(stores_of(one.cache).free) == 16
    monkeypatch.setattr(attached, "_IDLE_SECONDS", 0.0)
    until(lambda: len(stores_of(one.cache).free) == 2, one.cache.poll)
    until(service.accounted)
    monkeypatch.setattr(attached, "_IDLE_SECONDS", 1e9)
    assert one.store(keys_of("a", 2)) == keys_of("a", 2)
    # A quarter may be missing before the service grants others.
    until(lambda: len(stores_of(one.cache).free) >= 12, one.cache.poll)


def test_an_engine_at_rest_gets_slots_after_a_clear(
    make_service: Callable[..., Service], attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has returned most, and then all."""
    monkeypatch.setattr("flexkv.service.attached._IDLE_SLOTS", 2)
    monkeypatch.setattr("flexkv.service.attached._IDLE_SHARE", 64)
    service = make_service(64)
    one = attach(service, step_blocks=1000)
    monkeypatch.setattr("flexkv.service.attached._IDLE_SECONDS", 0.0)
    until(lambda: len(stores_of(one.cache).free) == 2, one.cache.poll)
    before = set(stores_of(one.cache).granted)
    clear_pools(service.root, None)
    until(lambda: not before & stores_of(one.cache).granted, one.cache.poll)
    until(lambda: len(stores_of(one.cache).free) == 2, one.cache.poll)
    keys = keys_of("a", 2)
    assert one.store(keys) == keys
    assert one.load(keys)


@pytest.mark.parametrize("kind", [Reset.CLEAR, Reset.EMPTY, Reset.RENEW])
def test_a_reset_of_one_engine_leaves_the_blocks_to_others(
    service: Service, attach: Attach, kind: Reset
) -> None:
    """It also ends a suspension."""
    one, other = attach(service), attach(service)
    keys, later = keys_of("a", 3), keys_of("b", 3)
    one.store(keys)
    under_way = ordered(one, later)
    one.cache.reset(Reset.SUSPEND)
    assert one.cache.status.disabled
    one.cache.reset(kind)
    assert not one.cache.status.disabled
    one.copy(under_way)
    one.settle()
    new = keys_of("c", 3)
    until(lambda: one.cache.lookup(new) == 3, lambda: one.store(new))
    assert other.cache.lookup(keys) == 3
    assert other.cache.lookup(later) == 0, "stored before the reset, under the keys of before"
    until(service.accounted)


def test_changes_reach_those_who_watch(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    other.cache.watch()
    other.settle()
    keys = keys_of("a", 3)
    one.store(keys)
    seen: list[Changes] = []
    until(lambda: seen, lambda: (other.cache.poll(), seen.extend(other.cache.drain_changes())))
    assert [(each.medium, each.removed, each.added) for each in seen] == [
        (Medium.HOST, [], keys),
    ]
    assert not one.cache.status.has_changes


def test_figures_are_the_pools_and_the_engines_own(service: Service, attach: Attach) -> None:
    one, other = attach(service), attach(service)
    one.store(keys_of("a", 3))
    until(
        lambda: 3.0 in one.cache.figures().shared.values(),
        lambda: (one.cache.touch([b"x"]), one.cache.poll()),
    )
    assert one.cache.figures().counts["stored_blocks"] == 3
    assert other.cache.figures().counts["stored_blocks"] == 0


def test_an_error_loses_no_slot_and_no_hold(service: Service, attach: Attach) -> None:
    one = attach(service)
    keys = keys_of("a", 3)
    one.store(keys)
    kept = one.cache.load(keys[:1])
    assert kept is not None
    reader_of(one.cache).lease(keys)  # nobody knows of it
    lost = stores_of(one.cache).free.pop()
    one.cache.reset(Reset.RECOVER)
    one.cache.poll()
    assert reader_of(one.cache).held == 1
    assert lost in stores_of(one.cache).free
    one.copy(kept)
    one.settle()
    assert reader_of(one.cache).held == 0


def test_an_error_loses_no_message(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(service)
    keys = keys_of("a", 2)
    transfer = ordered(one, keys)
    one.copy(transfer)
    one.cache.poll()
    until(lambda: line_of(one.cache).has_news)
    with monkeypatch.context() as patch:
        patch.setattr(one.cache, "_hear", _raising)
        with pytest.raises(RuntimeError, match="on purpose"):
            one.cache.poll()
    assert one.cache.busy
    one.cache.reset(Reset.RECOVER)
    one.settle()
    assert not stores_of(one.cache).by_id
    until(service.accounted)
    assert sorted(stores_of(one.cache).free) == sorted(stores_of(one.cache).granted)


def _raising(*_: object) -> None:
    raise RuntimeError("on purpose")


def test_an_engine_that_reads_seldom_is_served_on(
    make_service: Callable[..., Service], attach: Attach
) -> None:
    """Its steps may last for seconds, in which it reads nothing, and others change much."""
    service = make_service(256)
    slow, other = attach(service), attach(service)
    slow.cache.watch()
    slow.settle()
    for number in range(300):
        other.store(keys_of(f"b {number}", 1))
    assert not any(engine.has_ended for engine in service.server.engines)
    bell = bell_of(line_of(slow.cache))
    assert (bell[SENT] - bell[READ]) % (1 << 32) <= 2, "all else waits until it has read"
    added: list[bytes] = []

    def read() -> None:
        slow.cache.poll()
        for change in slow.cache.drain_changes():
            added.extend(change.added)

    until(lambda: keys_of("b 299", 1)[0] in added, read)
    assert slow.store(keys_of("c", 2)) == keys_of("c", 2)


class TestAServiceThatIsGone:
    def test_blocks_in_host_memory_are_loaded_as_before(
        self, service: Service, attach: Attach
    ) -> None:
        one = attach(service)
        keys = keys_of("a", 4)
        one.store(keys)
        service.close()
        under_way = ordered(one, keys_of("b", 2))
        one.copy(under_way)
        until(lambda: not one.cache.busy, one.cache.poll)
        assert one.cache.lookup(keys) == 4
        assert one.load(keys)
        assert one.cache.store(keys_of("c", 2), range(2)) is None
        assert one.cache.fetch(keys_of("d", 2)) is None

    def test_a_service_that_hangs_costs_stores_only(
        self, make_service: Callable[..., Service], attach: Attach, tmp_path: Path
    ) -> None:
        service = make_service(64, ssd_cache_gb=0.001, ssd_cache_dir=(str(tmp_path / "disk"),))
        one = attach(service)
        keys = keys_of("a", 4)
        one.store(keys)
        on_disk = Changes(Medium.DISK, [], keys_of("d", 2) + keys_of("e", 2))
        service.pool.below.note([on_disk], are_all=True)
        service.stop()
        fetch = one.cache.fetch(keys_of("d", 2))
        assert fetch is not None
        until(lambda: one.cache.fetch_state(fetch).done, one.cache.poll)
        for number in range(100):
            transfer = one.cache.store(keys_of(f"s{number}", 1), [0])
            if transfer is not None:
                one.copy(transfer)
            one.cache.poll()
        assert one.cache.store(keys_of("t", 1), [0]) is None, "all granted slots are used"
        assert one.load(keys)
        until(lambda: one.cache.fetch(keys_of("e", 2)) is None)

    def test_what_waits_for_a_service_that_hangs_is_bounded(
        self, service: Service, attach: Attach
    ) -> None:
        one = attach(service)
        keys = keys_of("a", 2)
        one.store(keys)
        service.stop()
        prompt = [key.ljust(96, b"-") for key in keys_of("b", wire.MOST_KEYS)]
        for _ in range(3 * MOST_WAITING):
            one.cache.touch(prompt)
            one.cache.poll()
        line = line_of(one.cache)
        assert len(waiting_messages(line)) <= MOST_WAITING
        assert len(waiting_packets(line)) <= 1
        transfer = ordered(one, keys_of("c", 1))
        one.copy(transfer)
        one.cache.poll()
        assert isinstance(waiting_messages(line)[-1], wire.Publish), "slots depend on it"
        assert one.load(keys)


def test_a_slot_that_is_granted_again_after_its_store_is_the_engines(
    make_service: Callable[..., Service], attach: Attach
) -> None:
    """The engine hears of the grant and of the publication before it in one step."""
    service = make_service(16)
    one, other = attach(service, step_blocks=4), attach(service, step_blocks=4)
    index, number = index_of(service.pool.cache), one.ticket.client
    filler = 0
    while index.free_slots:
        other.store(keys_of(f"filler {filler}", 1))
        filler += 1
    keys = keys_of("a", 3)
    transfer = one.cache.store(keys, range(3))
    assert transfer is not None
    until(lambda: index.lookup(keys) == 3, lambda: other.store(keys))
    one.copy(transfer)
    one.cache.poll()  # the blocks are there already: their slots become free, and are granted next
    bell = bell_of(line_of(one.cache))
    until(lambda: bell[PUBLISHED] == 1 and {*transfer.slots} & {*index.taken_by(number)})
    one.settle()
    stores = stores_of(one.cache)
    assert stores.granted == set(index.taken_by(number))
    assert set(stores.free) == stores.granted


def test_an_error_after_a_publication_frees_no_slot_of_the_index(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(service)
    keys = keys_of("a", 3)
    transfer = one.cache.store(keys, range(3))
    assert transfer is not None
    one.copy(transfer)
    one.cache.poll()
    bell, stores = bell_of(line_of(one.cache)), stores_of(one.cache)
    until(lambda: bell[PUBLISHED] == 1)
    end = stores.end

    def fail(number: int) -> None:
        end(number)
        raise ZeroDivisionError("for the test")

    with monkeypatch.context() as patch:
        patch.setattr(stores, "end", fail)
        with pytest.raises(ZeroDivisionError):
            one.cache.poll()
    one.cache.reset(Reset.RECOVER)
    one.settle()
    assert not {*stores.free, *stores.granted} & {*transfer.slots}
    assert one.load(keys)
    assert one.store(keys_of("b", 2)) == keys_of("b", 2)
    assert has_all_cells(one)


def has_all_cells(one: Scheduler) -> bool:
    """Whether no cell of the board is in use."""
    return sorted(free_cells(one.arena.board)) == list(range(CELLS))


def test_an_error_after_a_failed_store_loses_no_cell(
    service: Service, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(service)
    transfer = ordered(one, keys_of("a", 3))
    one.copy(transfer, Status.FAILED)
    with monkeypatch.context() as patch:
        patch.setattr(stores_of(one.cache), "undo", _raising)
        with pytest.raises(RuntimeError, match="on purpose"):
            one.cache.poll()
    one.cache.reset(Reset.RECOVER)
    one.settle()
    assert {*stores_of(one.cache).free} >= {*transfer.slots}
    assert has_all_cells(one)
