# SPDX-License-Identifier: Apache-2.0
"""Questions to a store on a network that merge, are late or hang, and other calls that hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from store_client import DONE, SLOT, Client, clients, content, names

from flexkv.tiers import questions
from flexkv.tiers.base import Answer
from flexkv.tiers.circuit import FAILURES, CircuitState
from flexkv.tiers.job import Outcome
from packages.conftest import PATIENCE_SECONDS, Clock
from packages.inside_tiers import (
    hung_jobs,
    is_idle,
    link_of,
    questions_of,
    running_jobs,
    waiting_questions,
)
from packages.patience import wait_until

LONG = 60.0
"""Seconds that pass only if the clock is put forward."""


Make = Callable[..., Client]


@pytest.fixture
def make() -> Iterator[Make]:
    with clients() as make:
        yield make


@pytest.mark.parametrize("polled", [True, False], ids=["noted at the deadline", "at the answer"])
def test_questions_that_are_always_late_are_asked_no_more(
    make: Make, clock: Clock, polled: bool
) -> None:
    client = make(question_seconds=LONG, timeout_seconds=2 * LONG)
    for _ in range(FAILURES):
        assert client.tier.readable
        client.store.hanging = {"find"}
        client.tier.query(names("a"))
        wait_until(lambda: client.store.waiting == ["find"])
        clock.skip(LONG)
        assert not polled or client.tier.drain_answers() == []
        client.store.release_running()
        client.store.hanging = set()
        wait_until(lambda: not running_jobs(link_of(questions_of(client.tier))))
        answer = client.answer()
        assert (answer.has, answer.late) == ([False], True)  # of use for later requests
    assert not client.tier.readable


@pytest.mark.parametrize("polled", [True, False])
def test_the_wait_for_a_thread_makes_a_question_late(
    make: Make, clock: Clock, polled: bool
) -> None:
    """The questions that wait at their deadline fail, and the store never gets them."""
    client = make(question_seconds=LONG, timeout_seconds=10 * LONG)
    client.occupy_calls()
    tickets = [client.tier.query(names("a")) for _ in range(FAILURES)]
    assert client.tier.drain_answers() == []
    clock.skip(LONG)
    failed = [Answer(ticket, None, late=True) for ticket in tickets]
    if polled:
        assert client.tier.drain_answers() == failed
        assert not waiting_questions(client.tier)
        assert client.tier.figures.openings == 1
        assert not client.tier.readable
    client.store.release()
    link = link_of(questions_of(client.tier))
    wait_until(lambda: is_idle(link))
    answers = client.answers(questions.CALLS + (0 if polled else len(failed)))
    late = [answer for answer in answers if answer.has is None]
    assert late == ([] if polled else failed)
    assert names("a") not in client.store.finds


def test_questions_that_wait_become_one_call(make: Make) -> None:
    client = make()
    client.store.fill({key: content(key) for key in names("bx")})
    client.occupy_calls()
    calls = len(client.store.calls)
    asked = {client.tier.query(names(text), names("x")): text for text in "abcdefghij"}
    client.store.release()
    answers = {answer.ticket: answer for answer in client.answers(questions.CALLS + len(asked))}
    assert {text: answers[ticket].has for ticket, text in asked.items()} == {
        text: [text == "b", True] for text in "abcdefghij"
    }
    assert sorted(client.store.calls[calls:])[-1] == len(asked)


def test_a_call_has_a_bound_of_keys_and_one_epoch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "CALL_KEYS", 3)
    client = make()
    client.occupy_calls()
    for text in ("ab", "c", "defgh", "i", "j", "k", "l"):
        client.tier.query(names(text))
    client.tier.clear()
    client.tier.query(names("m"))
    client.store.release()
    client.answers(questions.CALLS + 8)
    assert sorted(client.store.calls) == [1] * (questions.CALLS + 3) + [2, 3]


def test_a_question_beyond_the_bound_fails_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "MOST_WAITING", 2)
    client = make()
    client.occupy_calls()
    waiting = [client.tier.query(names("a")) for _ in range(2)]
    for _ in range(FAILURES + 1):
        refused = client.tier.query(names("b"))
        assert client.tier.drain_answers() == [Answer(refused, None, late=True)]
    assert client.tier.readable  # the store had no part in it
    client.store.release()
    answers = {each.ticket: each.has for each in client.answers(questions.CALLS + 2)}
    assert [answers[ticket] for ticket in waiting] == [[False]] * 2
    assert client.ask("b") == [False]


def test_a_question_whose_call_hangs_fails_at_the_timeout_and_has_no_second_answer(
    make: Make, clock: Clock
) -> None:
    client = make(question_seconds=LONG, timeout_seconds=2 * LONG)
    client.store.hanging = {"find"}
    ticket = client.tier.query(names("a"))
    wait_until(lambda: client.store.waiting == ["find"])
    clock.skip(LONG)
    assert client.tier.drain_answers() == []
    clock.skip(LONG)
    assert client.tier.drain_answers() == [Answer(ticket, None, late=True)]
    client.store.release()
    wait_until(lambda: not hung_jobs(link_of(questions_of(client.tier))))
    assert client.tier.drain_answers() == []
    assert client.ask("a") == [False]


def test_a_drained_tier_answers_nothing_of_before(make: Make) -> None:
    client = make()
    client.store.fill({b"a": content(b"a")})
    client.occupy_calls()
    client.tier.query(names("a"))
    assert client.tier.drain()
    client.store.release()
    link = link_of(questions_of(client.tier))
    wait_until(lambda: is_idle(link))
    assert client.tier.drain_answers() == []
    assert client.ask("a") == [True]
    assert client.store.finds.count(names("a")) == 1


def test_a_drained_tier_asks_again_after_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise MemoryError

    client = make()
    with monkeypatch.context() as patch:
        patch.setattr(link_of(questions_of(client.tier)), "submit", fail)
        with pytest.raises(MemoryError):
            client.tier.query(names("a"))
    assert client.tier.drain()
    assert client.ask("a") == [False]


def test_a_tier_is_not_drained_while_a_call_hangs(make: Make, clock: Clock) -> None:
    """The call may still write to its buffers."""
    client = make()
    client.store.hanging = {"get"}
    client.begin_read("a")
    wait_until(lambda: client.store.waiting == ["get"])
    clock.skip(PATIENCE_SECONDS + 1)
    assert client.tier.poll() == []
    assert not client.tier.drain()
    client.store.release()
    wait_until(client.tier.drain)
    assert client.tier.poll() == []


def test_a_hanging_store_is_not_asked(make: Make, clock: Clock) -> None:
    client = make(question_seconds=20 * LONG, timeout_seconds=10 * LONG)
    client.occupy_calls()
    assert client.tier.readable
    clock.skip(10 * LONG + 1)
    assert len(client.tier.drain_answers()) == questions.CALLS
    assert not client.tier.readable
    figures = client.tier.figures
    assert (figures.reads, figures.writes) == ({CircuitState.OPEN: 1}, {CircuitState.CLOSED: 1})
    assert client.write("a") == [DONE]
    client.store.release()
    wait_until(lambda: not hung_jobs(link_of(questions_of(client.tier))))
    assert client.tier.readable
    assert client.tier.figures.reads == {CircuitState.CLOSED: 1}


def test_one_hung_question_leaves_the_store_readable(make: Make, clock: Clock) -> None:
    client = make(question_seconds=20 * LONG, timeout_seconds=10 * LONG)
    client.store.hanging = {"find"}
    client.tier.query(names("a"))
    wait_until(lambda: client.store.waiting == ["find"])
    client.store.hanging.clear()
    clock.skip(10 * LONG + 1)
    assert [answer.has for answer in client.tier.drain_answers()] == [None]
    assert client.tier.readable
    assert client.ask("b") == [False]


@pytest.mark.parametrize("call", ["get", "put"])
def test_one_hung_call_takes_only_its_own_blocks(make: Make, clock: Clock, call: str) -> None:
    client = make(batch_bytes=SLOT)
    client.write("b")
    client.store.hanging = {call}
    begin = client.begin_read if call == "get" else client.begin_write
    hung = begin("a")
    wait_until(lambda: client.store.waiting == [call])
    client.store.hanging.clear()
    clock.skip(PATIENCE_SECONDS + 1)
    assert client.tier.poll() == []
    assert set(client.tier.hung(hung)) == {0}
    assert client.tier.readable
    assert client.read("b") == [DONE]
    assert client.write("cd") == [DONE] * 2
    client.store.release()
    assert client.outcomes(hung, 1) == [Outcome.MISSING if call == "get" else DONE]


def test_a_hang_counts_once_for_the_circuit(make: Make, clock: Clock) -> None:
    client = make(batch_bytes=SLOT)
    for number in range(FAILURES):
        assert client.tier.readable
        client.store.hanging = {"get"}
        hung = client.begin_read("a")
        wait_until(lambda: client.store.waiting == ["get"])
        clock.skip(PATIENCE_SECONDS + 1)
        assert client.tier.poll() == []
        assert client.tier.figures.openings == (number == FAILURES - 1)
        client.store.release_running()
        assert client.outcomes(hung, 1) == [Outcome.MISSING]
    assert client.tier.figures.openings == 1
