# SPDX-License-Identifier: Apache-2.0
"""Turns of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from flexkv.tiers.mooncake.mooncake_store import Turns
from packages.conftest import PATIENCE_SECONDS
from packages.inside_tiers import hang_after, threads_inside
from packages.patience import wait_until


def begin(work: Callable[[], None]) -> threading.Thread:
    """A thread that keeps no process alive if it waits for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def end(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def wait_for(turns: Turns, waiting: int) -> None:
    wait_until(lambda: turns.waiting >= waiting)


def test_who_waits_comes_before_who_has_just_left() -> None:
    turns = Turns(1, PATIENCE_SECONDS)
    came: list[str] = []
    waiting: list[threading.Thread] = []

    def come(name: str) -> None:
        with turns:
            came.append(name)

    def come_twice() -> None:
        with turns:
            came.append("first")
            for number, name in enumerate("abc", 1):
                waiting.append(begin(partial(come, name)))
                wait_for(turns, number)
        come("again")

    end(begin(come_twice))
    end(*waiting)
    assert came == ["first", "a", "b", "c", "again"]


def test_so_many_are_inside_at_once() -> None:
    turns = Turns(2, PATIENCE_SECONDS)
    inside, leave = threading.Semaphore(0), threading.Event()

    def stay() -> None:
        with turns:
            inside.release()
            leave.wait(PATIENCE_SECONDS)

    threads = [begin(stay) for _ in range(3)]
    assert all(inside.acquire(timeout=PATIENCE_SECONDS) for _ in range(2))
    wait_for(turns, 1)
    assert not inside.acquire(blocking=False)
    leave.set()
    assert inside.acquire(timeout=PATIENCE_SECONDS)
    end(*threads)


def test_an_error_inside_frees_the_place() -> None:
    turns = Turns(1, PATIENCE_SECONDS)
    with pytest.raises(OSError, match="inside"), turns:
        raise OSError("inside")

    def come() -> None:
        with turns:
            pass

    end(begin(come))


def test_a_thread_that_hangs_inside_gives_its_place_up_once() -> None:
    turns = Turns(1, 0.01)
    inside, leave = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        with turns:
            inside.release()
            leave.wait(PATIENCE_SECONDS)

    def come() -> None:
        with turns:
            inside.release()

    hung = begin(hang)
    assert inside.acquire(timeout=PATIENCE_SECONDS)
    end(begin(come), begin(come))
    leave.set()
    end(hung)


def test_a_thread_that_has_hung_leaves_no_place_of_another() -> None:
    turns = Turns(1, 0.01)
    leave, stay = threading.Event(), threading.Event()

    def hang(until: threading.Event) -> None:
        with turns:
            until.wait(PATIENCE_SECONDS)

    hung = begin(partial(hang, leave))
    wait_until(lambda: threads_inside(turns) == 1)
    hang_after(turns, PATIENCE_SECONDS)
    other = begin(partial(hang, stay))
    wait_until(lambda: threads_inside(turns) == 2)
    third = begin(partial(hang, stay))
    wait_for(turns, 1)
    leave.set()
    end(hung)
    assert turns.waiting == 1
    stay.set()
    end(other, third)
