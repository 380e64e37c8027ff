# SPDX-License-Identifier: Apache-2.0
"""A tier over a store in memory, as one thread uses it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from memory_store import FINGERPRINT, MemoryStore

from flexkv.tiers import questions
from flexkv.tiers.base import Answer, BlockResult
from flexkv.tiers.job import Outcome, Priority
from flexkv.tiers.remote import RemoteLimits, RemoteTier
from flexkv.types.changes import Medium
from packages.patience import wait_until

SLOT = 4096
SLOTS = 64
DONE = Outcome.DONE


def names(text: str) -> list[bytes]:
    return [each.encode() for each in text]


def content(key: bytes) -> bytes:
    return (key * SLOT)[:SLOT]


class Client:
    """A tier over a store, and buffers that are borrowed by one batch at a time."""

    def __init__(self, store: MemoryStore, **limits: Any) -> None:
        self.store = store
        given = RemoteLimits(**({"question_seconds": 60.0, "timeout_seconds": 60.0} | limits))
        self.tier = RemoteTier(Medium.DISK, store.opened(given, "disk"), FINGERPRINT, SLOT)
        self._memory = memoryview(mmap.mmap(-1, SLOT * SLOTS))
        self.buffers = [self._memory[i * SLOT : (i + 1) * SLOT] for i in range(SLOTS)]
        self._results: list[BlockResult] = []

    def outcomes(self, ticket: int, count: int) -> list[Outcome]:
        def came() -> bool:
            self._results += self.tier.poll()
            return sum(result.ticket == ticket for result in self._results) == count

        wait_until(came)
        mine = {each.position: each.outcome for each in self._results if each.ticket == ticket}
        self._results = [each for each in self._results if each.ticket != ticket]
        return [mine[i] for i in range(count)]

    def begin_read(self, text: str, priority: Priority = Priority.LOAD) -> int:
        keys = names(text)
        return self.tier.read(keys, self.buffers[: len(keys)], priority)

    def read(self, text: str) -> list[Outcome]:
        """The outcome of each block; the bytes of all that are DONE were right."""
        outcomes = self.outcomes(self.begin_read(text), len(text))
        for key, buffer, outcome in zip(names(text), self.buffers, outcomes, strict=False):
            assert outcome is not Outcome.DONE or bytes(buffer) == content(key)
        return outcomes

    def begin_write(self, text: str) -> int:
        keys = names(text)
        for key, buffer in zip(keys, self.buffers, strict=False):
            buffer[:] = content(key)
        return self.tier.write(keys, self.buffers[: len(keys)])

    def write(self, text: str) -> list[Outcome]:
        return self.outcomes(self.begin_write(text), len(text))

    def ask(self, text: str) -> Sequence[bool] | None:
        ticket = self.tier.query(names(text))
        answer = self.answer()
        assert answer.ticket == ticket
        return answer.has

    def answer(self) -> Answer:
        (answer,) = self.answers(1)
        return answer

    def answers(self, count: int) -> list[Answer]:
        """The next answers, each to another question."""
        answers: list[Answer] = []

        def came() -> bool:
            answers.extend(self.tier.drain_answers())
            return len(answers) >= count

        wait_until(came)
        assert len({answer.ticket for answer in answers}) == len(answers) == count
        return answers

    def occupy_calls(self) -> None:
        """Have a question hang in each call that may run."""
        self.store.hanging = {"find"}
        for number in range(questions.CALLS):
            self.tier.query(names("?"))
            wait_until(partial(self._hangs, number + 1))

    def _hangs(self, calls: int) -> bool:
        return len(self.store.waiting) == calls


@contextmanager
def clients() -> Iterator[Callable[..., Client]]:
    """Makes clients of a store, which are closed at the end."""
    made: list[Client] = []

    def start(store: MemoryStore | None = None, **limits: Any) -> Client:
        made.append(Client(store or MemoryStore(), **limits))
        return made[-1]

    yield start
    for client in made:
        client.store.release()
        client.store.broken.clear()
        assert client.tier.close()
