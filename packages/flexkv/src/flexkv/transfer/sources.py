# SPDX-License-Identifier: Apache-2.0
"""Lower tiers as sources of blocks, with what is known of the blocks that each has."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.figures.definitions import TierCounters
from flexkv.tiers.base import AnyTier, AskedTier, AttachedTier, IndexedTier
from flexkv.types.changes import Medium

HAS_SECONDS = 60.0
"""Seconds for which a block counts as present after the tier has reported or written it. If the
tier has evicted the block since, a read finds nothing. Not tuned."""

LACKS_SECONDS = 5.0
"""Seconds for which a block counts as absent after the tier has reported that. An engine may look
a waiting request up in every step; the tier is asked once in this time. A block that another node
writes meanwhile is a miss until then. Not tuned."""

_ANSWERS = 1 << 17
"""The most answers that are remembered, about 20 MB. Not tuned."""


class Source(abc.ABC):
    """A tier at its place among the tiers of a cache. Single-threaded.

    Attributes:
        tier: the tier; the cache owns it.
        place: the position among the tiers; 0 for the fastest.
        stall_seconds: see `AttachedTier`.
        counters: counts of the blocks fetched from the tier and written to it.
        left_out: whether the tier counts as empty and is not called, because a call of it has hung
            since before the cache recovered from an error.
    """

    def __init__(self, tier: AnyTier, place: int, stall_seconds: float) -> None:
        self.tier = tier
        self.place = place
        self.stall_seconds = stall_seconds
        self.counters = TierCounters()
        self.left_out = False

    @property
    def medium(self) -> Medium:
        """The medium of the tier."""
        return self.tier.medium

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Whether a question awaits its answer or its deadline, which `poll` notices, or the tier
        has news."""

    @abc.abstractmethod
    def look(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        """For each key whether the tier can give its block now; None if the tier has to be asked,
        or is being asked. No side effect."""

    @abc.abstractmethod
    def ask(self, keys: Sequence[bytes], behind: Sequence[bytes] = ()) -> None:
        """Ask the tier about keys for which `look` returned None. Does not wait. The arguments are
        those of `AskedTier.ask`."""

    @abc.abstractmethod
    def note(self, key: bytes, has: bool) -> None:
        """Remember that a read or write has shown whether the tier has the block."""

    @abc.abstractmethod
    def poll(self) -> bool:
        """Whether `look` may know more than at the last call."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget all answers, because the tier was cleared."""

    def forget(self) -> None:
        """Forget all answers and questions, because the tier was drained."""
        self.clear()


class IndexedSource(Source):
    """A tier that knows its blocks. It is never asked, and nothing is remembered."""

    def __init__(self, tier: IndexedTier, place: int, stall_seconds: float) -> None:
        super().__init__(tier, place, stall_seconds)
        self._indexed = tier

    @property
    def busy(self) -> bool:
        return self._indexed.has_news and not self.left_out

    def look(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        return [False] * len(keys) if self.left_out else self._indexed.contains(keys)

    def ask(self, keys: Sequence[bytes], behind: Sequence[bytes] = ()) -> None:
        pass

    def note(self, key: bytes, has: bool) -> None:
        pass

    def poll(self) -> bool:
        return False

    def clear(self) -> None:
        pass


@dataclass(slots=True)
class _Question:
    """The keys of one question to a tier; none once the answer is of no use."""

    keys: Sequence[bytes]
    deadline: float
    late: bool = False


class AskedSource(Source):
    """A tier that has to ask, and its answers of the last seconds."""

    def __init__(self, tier: AskedTier, place: int, stall_seconds: float) -> None:
        super().__init__(tier, place, stall_seconds)
        self._asked = tier
        self._known: dict[bytes, tuple[bool, float]] = {}
        self._asking: dict[bytes, float] = {}
        self._questions: dict[int, _Question] = {}

    @property
    def busy(self) -> bool:
        return any(not question.late for question in self._questions.values())

    def look(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        now, readable = time.monotonic(), self._asked.readable and not self.left_out
        return [self._look(key, now, readable) for key in keys]

    def ask(self, keys: Sequence[bytes], behind: Sequence[bytes] = ()) -> None:
        wanted, others = self._not_asked(keys), self._not_asked(behind)
        if wanted and wanted[0] == keys[0]:
            self._ask(wanted, others)
            return
        # Another question is about the first block: its answer is not that of the next one.
        self._ask(wanted, [])
        self._ask([], others)

    def note(self, key: bytes, has: bool) -> None:
        self._remember(key, has, time.monotonic())

    def poll(self) -> bool:
        now = time.monotonic()
        news = False
        for answer in self._asked.drain_answers():
            question = self._questions.pop(answer.ticket)
            self.counters.late_questions += answer.late and not question.late
            has = answer.has or [False] * len(question.keys)
            for key, each in zip(question.keys, has, strict=False):
                del self._asking[key]
                self._remember(key, each, now)
            news = True
        for question in self._questions.values():
            if question.deadline <= now and not question.late:
                question.late = news = True
                self.counters.late_questions += 1
        return news

    def clear(self) -> None:
        self._known.clear()
        self._asking.clear()
        for question in self._questions.values():
            question.keys = ()

    def forget(self) -> None:
        self.clear()
        self._questions.clear()

    def _not_asked(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in dict.fromkeys(keys) if key not in self._asking]

    def _ask(self, keys: list[bytes], behind: list[bytes]) -> None:
        all_keys = keys + behind
        if not all_keys:
            return
        deadline = time.monotonic() + self._asked.question_seconds
        self._questions[self._asked.ask(keys, behind)] = _Question(all_keys, deadline)
        self._asking.update(dict.fromkeys(all_keys, deadline))

    def _look(self, key: bytes, now: float, readable: bool) -> bool | None:
        has, until = self._known.get(key, (False, 0.0))
        if until > now:
            return has and readable
        if not readable or self._asking.get(key, now + 1.0) <= now:
            return False
        return None

    def _remember(self, key: bytes, has: bool, now: float) -> None:
        known = self._known
        known.pop(key, None)  # to its end
        known[key] = has, now + (HAS_SECONDS if has else LACKS_SECONDS)
        if len(known) > _ANSWERS:
            del known[next(iter(known))]


def sources_of(tiers: Sequence[AttachedTier]) -> list[Source]:
    """A source for each of `tiers`, the fastest first."""
    return [
        AskedSource(each.tier, place, each.stall_seconds)
        if isinstance(each.tier, AskedTier)
        else IndexedSource(each.tier, place, each.stall_seconds)
        for place, each in enumerate(tiers)
    ]
