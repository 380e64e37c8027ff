# SPDX-License-Identifier: Apache-2.0
"""A lower tier in memory: the test decides how each read and write ends, and when."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from flexkv.eviction import RequestContext
from flexkv.tiers.base import Answer, BlockResult, TierFigures, Traffic
from flexkv.tiers.job import Outcome, Priority, Urgency
from flexkv.types.changes import Medium


@dataclass(slots=True, eq=False)
class Task:
    """A block to be read or written, without a result as yet.

    Attributes:
        begun: its device works on it: it can be cancelled no longer.
    """

    ticket: int
    position: int
    key: bytes
    buffer: memoryview
    priority: Priority
    epoch: int
    turn: int = 0
    begun: bool = False

    @property
    def writes(self) -> bool:
        return self.priority is Priority.WRITE


class MemoryTier:
    """See `IndexedTier`. What it keeps has no bound.

    Attributes:
        blocks: what it has, least recently used first.
        tasks: without a result, in the order in which they were asked for.
        hanging: keys of blocks whose reads hang alone.
        stalled: keys of blocks that cannot be read now, as their device hangs.
        full: whether it drops what is to be written.
    """

    def __init__(self, medium: Medium = Medium.DISK) -> None:
        self.medium = medium
        self.blocks: dict[bytes, bytes] = {}
        self.tasks: list[Task] = []
        self.hanging: set[bytes] = set()
        self.stalled: set[bytes] = set()
        self.full = False
        self._tickets = itertools.count(1)
        self._results: list[BlockResult] = []
        self._epoch = 0

    @property
    def figures(self) -> TierFigures:
        return TierFigures(len(self.blocks), 0, 0, 0, len(self.tasks), 0, {}, {}, 0, Traffic())

    def end(self, task: Task, outcome: Outcome = Outcome.DONE) -> None:
        """A block's read or write has ended; a read that was not DONE leaves garbage."""
        self.tasks.remove(task)
        self._results.append(BlockResult(task.ticket, task.position, outcome))
        buffer, task.buffer = task.buffer, memoryview(b"")  # borrowed no longer
        if task.writes:
            if outcome is Outcome.DONE and task.epoch == self._epoch:
                self.blocks[task.key] = bytes(buffer)
            return
        size = len(buffer)
        if outcome is Outcome.DONE:
            buffer[:] = self.blocks.get(task.key, bytes(size))
        else:
            buffer[:] = b"?" * size
        if outcome in (Outcome.DAMAGED, Outcome.FAILED):
            self.blocks.pop(task.key, None)

    def end_all(self, outcome: Outcome = Outcome.DONE) -> None:
        for task in list(self.tasks):
            self.end(task, outcome)

    def of(self, key: bytes) -> Task:
        """The only task for `key`."""
        (task,) = (task for task in self.tasks if task.key == key)
        return task

    @property
    def being_written(self) -> set[bytes]:
        """Keys of the writes that arrive if they succeed: all since the last clear."""
        return {task.key for task in self.tasks if task.writes and task.epoch == self._epoch}

    def watch(self) -> None:
        pass

    @property
    def has_news(self) -> bool:
        return False

    @property
    def has_changes(self) -> bool:
        return False

    def drain_changes(self, limit: int) -> dict[bytes, bool]:
        return {}

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        """Nothing emits events."""

    def listed(self) -> Iterator[list[bytes]]:
        yield list(self.blocks)

    def take_descriptions(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return {}

    def remove_old(self) -> None:
        """Its blocks have no greatest age."""

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def sync(self) -> list[Future[str]]:
        return []

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        return [key in self.blocks and key not in self.stalled for key in keys]

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        priority: Priority,
        turn: int = 0,
    ) -> int:
        ticket = next(self._tickets)
        for position, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if key in self.blocks:
                self.tasks.append(Task(ticket, position, key, buffer, priority, self._epoch, turn))
            else:
                self._results.append(BlockResult(ticket, position, Outcome.MISSING))
        return ticket

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        ticket = next(self._tickets)
        for position, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if key in self.blocks or key in self.being_written:
                self._results.append(BlockResult(ticket, position, Outcome.DONE))
            elif self.full:
                self._results.append(BlockResult(ticket, position, Outcome.DROPPED))
            else:
                self.tasks.append(Task(ticket, position, key, buffer, Priority.WRITE, self._epoch))
        return ticket

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        pass

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        pass

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks[key] = self.blocks.pop(key)

    def delete(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def clear(self) -> None:
        self.blocks.clear()
        self._epoch += 1

    empty = clear

    def cancel(self, ticket: int) -> None:
        for task in list(self.tasks):
            if task.ticket == ticket and not task.begun:
                self.end(task, Outcome.DROPPED)

    def hung(self, ticket: int) -> Collection[int]:
        return {
            task.position
            for task in self.tasks
            if task.ticket == ticket and task.key in self.hanging
        }

    def raise_priority(self, ticket: int, urgency: Urgency) -> None:
        for task in self.tasks:
            if task.ticket == ticket and not task.begun:
                task.priority, task.turn = min((task.priority, task.turn), urgency)

    def poll(self) -> list[BlockResult]:
        results, self._results = self._results, []
        return results

    def drain(self) -> bool:
        self.tasks = [task for task in self.tasks if task.begun]
        self._results.clear()
        return not self.tasks

    def begin_close(self, flush_seconds: float) -> None:
        pass

    def close(self, flush_seconds: float = 0.0) -> bool:
        return True


class QueriedMemoryTier:
    """See `QueriedTier`: a `MemoryTier` that others fill, and that answers when the test says.

    Attributes:
        memory: what it has, and its reads and writes.
        questions: keys of those without an answer, by ticket.
        readable: whether it is worth asking.
    """

    def __init__(self, memory: MemoryTier, question_seconds: float) -> None:
        self.memory = memory
        self.medium = memory.medium
        self.question_seconds = question_seconds
        self.questions: dict[int, list[bytes]] = {}
        self.readable = True
        self._asked = itertools.count(1)
        self._answers: list[Answer] = []
        self._asking: set[bytes] = set()  # since the last clear
        self.read, self.write, self.poll = memory.read, memory.write, memory.poll
        self.cancel, self.raise_priority, self.hung = (
            memory.cancel,
            memory.raise_priority,
            memory.hung,
        )
        self.begin_close, self.close = memory.begin_close, memory.close

    @property
    def figures(self) -> TierFigures:
        return self.memory.figures

    def register(self, address: int, size: int) -> None:
        pass

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> int:
        keys = [*keys, *scattered]
        assert self._asking.isdisjoint(keys), "asked twice at a time"
        self._asking.update(keys)
        ticket = next(self._asked)
        self.questions[ticket] = keys
        return ticket

    def clear(self) -> None:
        self.memory.clear()
        self._asking.clear()

    empty = clear

    def answer(self, ticket: int, known: bool = True) -> None:
        """Answer a question; or say that it cannot be found out."""
        keys = self.questions.pop(ticket)
        self._asking.difference_update(keys)
        has = [key in self.memory.blocks for key in keys] if known else None
        self._answers.append(Answer(ticket, has))

    def drain(self) -> bool:
        self.questions.clear()
        self._answers.clear()
        self._asking.clear()
        return self.memory.drain()

    def drain_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers
