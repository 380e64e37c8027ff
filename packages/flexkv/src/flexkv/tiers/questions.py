# SPDX-License-Identifier: Apache-2.0
"""The questions to a store that engines share: which blocks does it have.

Questions that wait merge into one call, so a store that needs a moment for each call still answers
any number of them. A question that still waits at its deadline fails, and the store never gets it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from flexkv.tiers.job import Job, Outcome, Priority, text_of
from flexkv.tiers.link import Link

CALLS = 8
"""Calls that run at once. They have a link of their own, because behind reads they would miss their
deadline. Not tuned."""

CALL_KEYS = 8192
"""Questions merge into a call up to so many keys. By FlexKV, Mooncake's master answers for 100,000
to 270,000 keys a second."""

MOST_WAITING = 1024
"""The most questions that wait. A further one fails at once."""


class Question(NamedTuple):
    """See `QueriedTier.query`."""

    keys: Sequence[bytes]
    scattered: Sequence[bytes] = ()


Found: TypeAlias = Sequence[bool] | OSError
"""The answers for the keys of a question, the scattered ones last; or why there are none."""

Find: TypeAlias = Callable[[str, Sequence[Question], Callable[[int, Found], None]], None]
"""Asks a store for the blocks of an epoch; see `BlockStore.find`."""


@dataclass(slots=True, eq=False)
class Asked:
    """A question on its way. Times are time.monotonic(), in seconds.

    Attributes:
        at: when it was asked.
        called: whether a call has taken it.
        ended: when it was answered or failed; None before.
        has: the answer; None if the question failed.
        late: whether it had no answer at its deadline.
    """

    ticket: int
    epoch: str
    question: Question
    at: float
    called: bool = False
    ended: float | None = None
    has: Sequence[bool] | None = None
    error: str = ""
    late: bool = False


class Questions:
    """Asks a store. One thread calls the methods; only `close` waits.

    Args:
        name: prefix of the threads' names.
        deadline_seconds: time from `ask` on within which a call must take a question; a later
            answer is late.
        timeout_seconds: a question fails if its call takes longer, whatever the call does.
        note: called for each question once, at its answer or at its deadline, with whether it
            failed or is late, the text of its error, and its seconds until then.
    """

    def __init__(
        self,
        name: str,
        find: Find,
        deadline_seconds: float,
        timeout_seconds: float,
        note: Callable[[bool, str, float], None],
    ) -> None:
        self._find = find
        self._deadline_seconds = deadline_seconds
        self._timeout_seconds = timeout_seconds
        self._note = note
        self._link = Link(name, CALLS, 0, 0, timeout_seconds)
        self._open: dict[Asked, None] = {}
        self._lock = threading.Lock()
        self._waiting: deque[Asked] = deque()
        self._has_job = False  # whether a job waits that will take the first of them

    @property
    def stalled(self) -> bool:
        """See `Link`."""
        return self._link.stalled

    def begin(self, ticket: int, epoch: str, question: Question) -> bool:
        """Ask for the blocks of an epoch. Returns False, and asks nothing, if too many wait."""
        asked = Asked(ticket, epoch, question, time.monotonic())
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                return False
            self._waiting.append(asked)
            self._open[asked] = None
            self._submit()
        return True

    def poll(self) -> list[Asked]:
        """The questions that have ended since the last call, each once."""
        self._link.poll()
        self._link.note_hung()
        if not self._open:
            return []
        now = time.monotonic()
        noted = []
        with self._lock:
            for asked in self._open:
                limit = self._timeout_seconds if asked.called else self._deadline_seconds
                if asked.ended is None and now - asked.at >= limit:
                    asked.ended = now
                late = (asked.ended or now) - asked.at >= self._deadline_seconds
                if not asked.late and (late or asked.ended is not None):
                    noted.append(asked)
                asked.late |= late
            while self._waiting and self._waiting[0].ended is not None:
                self._waiting.popleft()
        ended = [asked for asked in self._open if asked.ended is not None]
        for asked in ended:
            del self._open[asked]
        for asked in noted:
            seconds = (asked.ended or now) - asked.at
            self._note(asked.late or asked.has is None, asked.error, seconds)
        return ended

    def drain(self) -> None:
        """Forget all questions. Calls that run hold nothing of the caller's, and `poll` returns
        none of their questions."""
        with self._lock:
            self._waiting.clear()
            self._open.clear()
            # An error may have lost the job that was to take them.
            self._link.drain()
            self._has_job = False

    def begin_close(self) -> None:
        """Take no further question to the store. Idempotent."""
        self._link.begin_close(0.0)

    def close(self, timeout: float) -> bool:
        """See `Link.close`."""
        return self._link.close(timeout)

    def _submit(self) -> None:
        """Have a thread take the questions that wait. One job suffices for all of them; a thread
        that takes some submits the next."""
        if self._waiting and not self._has_job:
            self._has_job = True
            self._link.submit(Job(Priority.LOAD, 0, self._call))

    def _call(self) -> list[Outcome]:
        """Ask the store what waits; in a thread of the link."""
        with self._lock:
            called = self._take(time.monotonic())
            self._has_job = False
            self._submit()

        def answer(number: int, found: Found) -> None:
            self._end(called[number], found)

        if not called:
            return [Outcome.DONE]
        try:
            self._find(called[0].epoch, [asked.question for asked in called], answer)
        except OSError as error:
            for asked in called:
                self._end(asked, error)
        finally:
            for asked in called:
                self._end(asked, OSError("the store gave no answer"))
        return [Outcome.DONE]

    def _take(self, now: float) -> list[Asked]:
        """Remove the first questions that wait, as many as one call may have."""
        taken: list[Asked] = []
        keys = 0
        while self._waiting:
            asked = self._waiting[0]
            if now - asked.at >= self._deadline_seconds:
                asked.ended = asked.ended or now
                self._waiting.popleft()
                continue
            keys += len(asked.question.keys) + len(asked.question.scattered)
            if taken and (keys > CALL_KEYS or asked.epoch != taken[0].epoch):
                break
            self._waiting.popleft()
            asked.called = True
            taken.append(asked)
        return taken

    def _end(self, asked: Asked, found: Found) -> None:
        """Answer a question, if it has not ended yet."""
        now = time.monotonic()
        with self._lock:
            if asked.ended is not None:
                return
            if isinstance(found, OSError):
                asked.error = text_of(found)
            else:
                asked.has = found
            asked.ended = now
