# SPDX-License-Identifier: Apache-2.0
"""A store on a network as a tier: what it answers, reads, writes, drops and gives up."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import pytest
from memory_store import FINGERPRINT, MemoryStore
from store_client import DONE, SLOT, Client, clients, content, names

from flexkv.tiers import circuit, device, epochs, remote
from flexkv.tiers.base import BlockResult, QueriedTier
from flexkv.tiers.circuit import FAILURES, CircuitState
from flexkv.tiers.job import Outcome, Priority, Urgency
from flexkv.tiers.remote import RemoteLimits, RemoteTier, address_of
from flexkv.types.changes import Medium
from packages.conftest import PATIENCE_SECONDS, Clock
from packages.inside_tiers import await_opening, knows_record, link_of, running_jobs
from packages.patience import wait_until

Make = Callable[..., Client]


@pytest.fixture
def make() -> Iterator[Make]:
    with clients() as make:
        yield make


def test_it_is_a_tier_that_is_asked(make: Make) -> None:
    client = make()
    assert isinstance(client.tier, QueriedTier)
    client.tier.register(4096, 8192)
    assert client.store.registered == (4096, 8192)
    buffer = client.buffers[3]
    assert address_of(buffer) - address_of(client.buffers[0]) == 3 * SLOT


def test_a_store_that_fails_at_the_start_is_retried_and_not_used_meanwhile(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.fill({b"a": content(b"a")})
    store.broken = {"open"}
    client = make(store)
    tier = client.tier
    assert tier.figures.reads == tier.figures.writes == {CircuitState.CONNECTING: 1}
    assert not tier.readable
    assert client.write("xy") == [Outcome.DROPPED] * 2
    assert client.read("a") == [Outcome.DROPPED]
    assert client.ask("ax") is None
    wait_until(lambda: store.opens > 2)
    assert (store.finds, store.gets, store.puts) == ([], [], [])
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("disk cannot be used (open); FlexKV retries until it can")

    store.broken = set()
    wait_until(lambda: tier.readable)
    assert tier.figures.reads == tier.figures.writes == {CircuitState.CLOSED: 1}
    assert client.write("xy") == [DONE] * 2
    assert make(store).ask("axyz") == [True] * 3 + [False]


def test_a_store_that_hangs_at_the_start_holds_the_engine_up_for_a_while_only(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "OPEN_SECONDS", 0.01)
    store = MemoryStore()
    store.hanging = {"open"}
    client = make(store)
    assert not client.tier.readable
    assert "disk cannot be used (no answer within 0.01 s)" in caplog.text
    store.release()
    wait_until(lambda: client.tier.readable)
    assert store.opens == 1
    assert client.write("a") == [DONE]


def test_a_reset_before_the_store_is_open_parts_the_engine_from_the_others(make: Make) -> None:
    store = MemoryStore()
    store.fill({b"a": content(b"a")})
    store.broken = {"open", "renew"}
    client = make(store)
    client.tier.clear()
    store.broken = set()
    wait_until(lambda: client.tier.readable)
    assert client.ask("a") == [False]
    assert client.write("a") == [DONE]
    wait_until(lambda: store.renewed == 1)
    assert store.keys() == []


def test_an_engine_that_never_reached_the_store_ends_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "OPEN_SECONDS", 0.01)
    store = MemoryStore()
    store.hanging = {"open"}
    client = Client(store)
    assert client.tier.close()
    assert store.closed
    store.broken = {"open"}
    lines = len(caplog.records)
    store.release()
    await_opening(client.tier, PATIENCE_SECONDS)
    assert store.opens == 1
    assert len(caplog.records) == lines


def test_other_processes_read_that_the_store_was_not_reached() -> None:
    class Told:
        """Keeps the call that reads the states."""

        def begin(self, read: Callable[[], Mapping[str, str]]) -> None:
            self.read = read
            self.first = read()

        def close(self) -> None:
            pass

    store, told = MemoryStore(), Told()
    store.broken = {"open"}
    opened = store.opened(RemoteLimits(60.0, 60.0), "disk")
    tier = RemoteTier(Medium.DISK, opened, FINGERPRINT, SLOT, told)
    assert told.first == {"reads": "connecting", "writes": "connecting"}
    store.broken = set()
    wait_until(lambda: told.read() == {"reads": "closed", "writes": "closed"})
    assert tier.close()


def test_what_one_engine_wrote_another_finds_and_reads(make: Make) -> None:
    one = make(batch_bytes=2 * SLOT)
    other = make(one.store)
    assert one.write("abcde") == [DONE] * 5
    assert other.ask("axe") == [True, False, True]
    assert other.read("abxe") == [DONE, DONE, Outcome.MISSING, DONE]
    figures = one.tier.figures
    assert (figures.written_blocks, figures.traffic.written_bytes) == (5, 5 * SLOT)
    assert other.tier.figures.traffic.read_bytes == 3 * SLOT
    assert figures.queued_blocks == figures.queued_bytes == 0


def test_an_open_circuit_drops_the_writes_that_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(threads=1, batch_bytes=SLOT)
    text = "abcdefghijklmnopqrstuvwxyz"
    calls, go = itertools.count(), threading.Event()

    def put(*_: object) -> NoReturn:
        if next(calls) >= FAILURES:
            go.wait()
        raise ConnectionError

    monkeypatch.setattr(client.store, "put", put)
    ticket = client.begin_write(text)
    results: list[BlockResult] = []
    # The write that hangs has no result.
    wait_until(lambda: len(results.__iadd__(client.tier.poll())) == len(text) - 1)
    go.set()
    assert [each.outcome for each in results[:FAILURES]] == [Outcome.FAILED] * FAILURES
    assert {each.outcome for each in results[FAILURES:]} == {Outcome.DROPPED}
    results = []
    wait_until(lambda: bool(results.__iadd__(client.tier.poll())))
    assert results == [BlockResult(ticket, FAILURES, Outcome.FAILED)]
    assert client.tier.figures.queued_blocks == 0
    assert client.tier.figures.writes == {CircuitState.OPEN: 1}


def test_writes_that_run_count_as_waiting(make: Make) -> None:
    client = make(threads=2, batch_bytes=SLOT, queue_bytes=4 * SLOT)
    client.store.hanging = {"put"}
    first = client.begin_write("abcd")
    wait_until(lambda: running_jobs(link_of(client.tier)) == 2)
    more = client.tier.write(names("e"), client.buffers[4:5])
    assert client.tier.poll() == [BlockResult(more, 0, Outcome.DROPPED)]
    client.store.release()
    assert client.outcomes(first, 4) == [DONE] * 4
    assert client.write("efgh") == [DONE] * 4


def test_the_first_call_of_a_read_is_short(make: Make) -> None:
    client = make(threads=1, batch_bytes=8 * SLOT)
    text = "abcdefghijklmnopqr"
    assert client.write(text) == client.read(text) == [DONE] * 18
    assert [len(keys) for keys in client.store.puts] == [8, 8, 2]
    assert [len(keys) for keys in client.store.gets] == [2, 8, 8]


def test_a_damaged_block_is_no_hit(make: Make) -> None:
    client = make()
    client.write("ab")
    client.store.damage(b"a")
    assert client.read("ab") == [Outcome.DAMAGED, DONE]


def test_what_is_being_written_is_not_written_twice(make: Make) -> None:
    client = make()
    client.store.hanging = {"put"}
    first = client.begin_write("abc")
    again = client.begin_write("bcd")
    client.store.release()
    assert client.outcomes(first, 3) == client.outcomes(again, 3) == [DONE] * 3
    assert sorted(client.store.puts) == [names("abc"), names("d")]


def test_writes_beyond_the_queue_are_dropped(make: Make) -> None:
    client = make(queue_bytes=3 * SLOT)
    assert client.write("abcd") == [Outcome.DROPPED] * 4
    assert client.write("abc") == [DONE] * 3
    assert client.store.keys() == names("abc")


def test_what_was_cancelled_before_it_began_is_dropped(make: Make) -> None:
    client = make(threads=1, batch_bytes=SLOT)
    client.write("ab")
    client.store.hanging = {"get"}
    ticket = client.begin_read("ab")
    wait_until(lambda: client.tier.figures.queued_bytes == SLOT)
    client.tier.cancel(ticket)
    client.store.release()
    assert client.outcomes(ticket, 2) == [DONE, Outcome.DROPPED]


def test_a_prefetch_that_is_raised_goes_first(make: Make) -> None:
    client = make(threads=1, batch_bytes=SLOT)
    client.write("abc")
    client.store.hanging = {"get"}
    busy = client.begin_read("a")
    wait_until(lambda: client.tier.figures.queued_bytes == 0)
    early = client.begin_read("b", Priority.PREFETCH)
    late = client.begin_read("c", Priority.PREFETCH)
    client.tier.raise_priority(late, Urgency(Priority.LOAD))
    client.store.release()
    for ticket in (busy, early, late):
        client.outcomes(ticket, 1)
    assert client.store.gets == [[b"a"], [b"c"], [b"b"]]


@pytest.mark.parametrize("call", ["get", "find"])
def test_failures_open_the_circuit_and_a_probe_closes_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, clock: Clock, call: str
) -> None:
    monkeypatch.setattr(circuit, "time", clock)
    client = make()
    client.write("a")
    client.store.broken = {call}
    for _ in range(FAILURES):
        assert client.tier.readable
        if call == "get":
            assert client.read("a") == [Outcome.FAILED]
        else:
            assert client.ask("a") is None
    figures = client.tier.figures
    assert not client.tier.readable
    assert (figures.reads, figures.writes) == ({CircuitState.OPEN: 1}, {CircuitState.CLOSED: 1})
    assert figures.openings == 1
    clock.skip(remote.PAUSE_SECONDS)
    assert client.tier.figures.reads == {CircuitState.PROBING: 1}
    assert client.tier.readable
    assert client.ask("a") == (None if call == "find" else [True])
    assert client.tier.readable is (call == "get")
    client.store.broken.clear()
    clock.skip(remote.PAUSE_SECONDS)
    assert client.ask("a") == [True]
    assert client.tier.readable
    assert client.read("a") == [DONE]


def test_failed_writes_stop_writes_and_no_reads(make: Make) -> None:
    client = make()
    client.write("a")
    client.store.broken = {"put"}
    for i in range(FAILURES):
        assert client.write(chr(ord("A") + i)) == [Outcome.FAILED]
    assert client.write("z") == [Outcome.DROPPED]
    assert client.read("a") == [DONE]
    assert client.tier.figures.writes == {CircuitState.OPEN: 1}


@pytest.mark.parametrize("call", ["get", "put", "find"])
def test_the_error_of_the_store_reaches_the_log(
    make: Make, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    client = make()
    client.write("a")
    client.store.broken = {call}
    for i in range(FAILURES):
        if call == "find":
            client.ask("a")
        else:
            (client.read if call == "get" else client.write)("a" if call == "get" else chr(98 + i))
    first, opened = [each.getMessage() for each in caplog.records]
    what = {"get": "reads from", "put": "writes to", "find": "questions to"}[call]
    assert first.startswith(f"{what} disk failed: {call};")
    assert f"{FAILURES} consecutive {what} disk failed" in opened
    assert f"the last: {call};" in opened


def test_the_error_of_one_block_of_a_call_reaches_the_log(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = make()
    monkeypatch.setattr(client.store, "put", lambda *_: [DONE, OSError("no access"), DONE])
    assert client.write("abc") == [DONE, Outcome.FAILED, DONE]
    (line,) = [each.getMessage() for each in caplog.records]
    assert "writes to disk failed: no access;" in line


def test_after_a_clear_nothing_of_before_is_found_nor_shared(
    make: Make, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(epochs, "time", clock)
    client = make()
    other, third = make(client.store), make(client.store)
    client.write("ab")
    client.store.hanging = {"put"}
    outdated = client.begin_write("x")
    wait_until(lambda: client.tier.figures.queued_bytes == 0)
    client.tier.clear()
    client.store.release()
    client.outcomes(outdated, 1)
    assert client.ask("abx") == [False] * 3
    assert client.read("a") == [Outcome.MISSING]
    wait_until(lambda: client.store.renewed == 1 and knows_record(client.tier, client.store))
    assert client.write("ac") == [DONE] * 2
    assert client.ask("abc") == [True, False, True]
    # Engines that were not reset go on together, and share nothing with the one that was.
    clock.skip(epochs.FRESH_SECONDS)
    assert other.ask("abc") == [False] * 3
    assert other.write("b") == [DONE]
    assert (client.ask("b"), third.ask("abc")) == ([False], [False, True, False])


@pytest.mark.parametrize("broken", [False, True])
def test_a_write_that_repeats_one_under_way_ends_with_it(make: Make, broken: bool) -> None:
    client = make()
    client.store.hanging = {"put"}
    first = client.begin_write("a")
    again = client.begin_write("a")
    assert client.tier.poll() == []
    client.store.broken = {"put"} if broken else set()
    client.store.release()
    results: list[BlockResult] = []
    wait_until(lambda: len(results.__iadd__(client.tier.poll())) == 2)
    outcome = Outcome.FAILED if broken else DONE
    assert results == [BlockResult(ticket, 0, outcome) for ticket in (first, again)]
    assert len(client.store.puts) == (0 if broken else 1)
    client.store.broken.clear()
    assert client.write("a") == [DONE]


def test_a_write_after_a_reset_repeats_none_of_before(make: Make) -> None:
    client = make()
    client.store.hanging = {"put"}
    client.begin_write("a")
    client.tier.clear()
    wait_until(lambda: client.store.renewed == 1 and knows_record(client.tier, client.store))
    client.begin_write("a")
    client.store.release()
    results: list[BlockResult] = []
    wait_until(lambda: len(results.__iadd__(client.tier.poll())) == 2)
    assert client.ask("a") == [True]


def test_a_reset_is_told_to_the_store_until_it_takes_it(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    client = make()
    client.store.broken = {"renew"}
    client.tier.clear()
    wait_until(lambda: "the record of a reset cannot be written" in caplog.text)
    assert client.ask("a") == [False]
    client.store.broken.clear()
    wait_until(lambda: client.store.renewed == 1)
    assert caplog.text.count("the record of a reset cannot be written") == 1


def test_a_reset_right_before_the_end_reaches_the_store() -> None:
    client = Client(MemoryStore())
    client.tier.clear()
    assert client.tier.close()
    assert client.store.renewed == 1
    assert client.store.closed


def test_a_store_that_hangs_at_the_end_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CLOSE_SECONDS", 0.05)
    client = Client(MemoryStore())
    client.store.hanging = {"get"}
    client.begin_read("a")
    wait_until(lambda: client.tier.figures.queued_bytes == 0)
    assert not client.tier.close()
    assert not client.store.closed
    client.store.release()


def test_writes_that_wait_are_made_at_the_end() -> None:
    client = Client(MemoryStore(), threads=1, batch_bytes=SLOT)
    client.begin_write("abcdefgh")
    assert client.tier.close()
    assert client.store.keys() == names("abcdefgh")
    assert client.tier.figures.written_blocks == 8


def test_a_store_that_answers_for_too_few_blocks_has_read_none(make: Make) -> None:
    client = make()
    client.write("abc")
    get = client.store.get
    client.store.get = lambda *call: get(*call)[:-1]  # type: ignore[method-assign]
    assert client.read("abc") == [Outcome.FAILED] * 3
    assert client.tier.drain()
