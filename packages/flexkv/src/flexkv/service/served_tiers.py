# SPDX-License-Identifier: Apache-2.0
"""The tiers below the memory of a pool, as one of its engines sees them, and its fetches."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.client import AwaitedBlocks, FetchId, FetchState
from flexkv.index.block_index import IndexReader
from flexkv.index.key_set import KeySet
from flexkv.service import messages as wire
from flexkv.service.line import Line
from flexkv.service.page import FetchRows
from flexkv.transfer.sources import ANSWERS, HAS_SECONDS, LACKS_SECONDS
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence, presence_below


class StoreAnswers:
    """What an engine knows of its pool's shared stores, by questions to the service.
    Single-threaded; no call waits. An answer is awaited for `seconds`. Then the block counts as
    absent, until there is one or `LACKS_SECONDS` are over."""

    def __init__(self, line: Line, seconds: float) -> None:
        self._line = line
        self._seconds = seconds
        self._known: dict[bytes, tuple[bool, float]] = {}
        self._asked: dict[bytes, float] = {}

    def has(self, key: bytes, now: float) -> bool | None:
        """Whether a store has the block of `key` at time.monotonic() `now`; None if that is unknown
        and may become known."""
        has, until = self._known.get(key, (False, 0.0))
        if until > now:
            return has
        asked = self._asked.get(key)
        is_late = asked is not None and self._seconds < now - asked <= LACKS_SECONDS
        return False if is_late else None

    def ask(self, keys: Sequence[bytes], scattered: Sequence[bytes]) -> bool:
        """Ask about blocks of which `has` does not know. Returns whether an answer is awaited. The
        arguments are those of `CacheClient.query`."""
        now = time.monotonic()
        unknown = {key for key in (*keys, *scattered) if self.has(key, now) is None}
        # Those that nobody has asked about, or that got no answer for long.
        new = {key for key in unknown if now - self._asked.get(key, 0.0) > LACKS_SECONDS}
        first = [key for key in keys if key in new]
        others = [key for key in scattered if key in new]
        for part in wire.parts(first):
            self._line.put(wire.Query(part, []))
        for part in wire.parts(others):
            self._line.put(wire.Query([], part))
        for key in (*first, *others):
            self._asked.pop(key, None)  # to its end
            self._asked[key] = now
        _limit(self._asked)
        if new:
            self._line.await_answer()
        return bool(unknown)

    def hear(self, message: wire.Answered) -> None:
        """The service answers."""
        now = time.monotonic()
        for has, keys in ((True, message.there), (False, message.absent)):
            until = now + (HAS_SECONDS if has else LACKS_SECONDS)
            for key in keys:
                self._asked.pop(key, None)
                self._known.pop(key, None)  # to its end
                self._known[key] = has, until
        _limit(self._known)

    def clear(self) -> None:
        """The service is gone, and with it all answers that it owed."""
        self._asked.clear()


def _limit(table: dict[bytes, float] | dict[bytes, tuple[bool, float]]) -> None:
    while len(table) > ANSWERS:
        del table[next(iter(table))]


ANSWER_SECONDS = 0.05
"""Seconds that a request waits for the service to say what shared stores have. Not tuned."""


@dataclass(slots=True, eq=False)
class _ServedFetch:
    """A fetch. `state` is what the service has told (`is_known`), or the guess at the beginning.
    `is_sure`: a disk had its blocks when it began. `ends`: no tier had the block that follows."""

    state: FetchState
    is_sure: bool
    ends: bool
    is_known: bool = False


class ServedTiers:
    """The lower tiers of a pool. What disks have is read from memory of the service, without a
    question. Single-threaded. `below` (what disks have) and `announced` (what engines of the pool
    store) are others after each new attachment."""

    def __init__(
        self,
        reader: IndexReader,
        line: Line,
        media: Sequence[Medium],
        *,
        below: KeySet,
        announced: KeySet,
        rows: FetchRows,
        asks_stores: bool,
    ) -> None:
        self.below = below
        self.announced = announced
        self._reader = reader
        self._line = line
        self._media = media
        self._rows = rows
        self._asks_stores = asks_stores
        self._answers = StoreAnswers(line, ANSWER_SECONDS)
        self._fetches: dict[FetchId, _ServedFetch] = {}
        self._next_fetch = 1

    @property
    def awaits_news(self) -> bool:
        """Whether the service is to tell, several times a second, how far a fetch is."""
        return any(not self._look(*each) for each in self._fetches.items())

    def presence(self, keys: Sequence[bytes]) -> list[Presence]:
        """The place of each block, in host memory or below."""
        there = self._reader.present(keys)
        absent = [key for key, each in zip(keys, there, strict=True) if not each]
        come = zip(self.below.contains(absent), self.announced.contains(absent), strict=True)
        now, knows_all = time.monotonic(), self._knows_all
        below = iter(
            [
                Presence.BELOW
                if any(each)
                else Presence.ABSENT
                if knows_all
                else presence_below(self._answers.has(key, now))
                for key, each in zip(absent, come, strict=True)
            ]
        )
        return [Presence.HOST if each else next(below) for each in there]

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes]) -> bool:
        if not self._asks_stores:
            return False
        return self._answers.ask(self._elsewhere(keys), self._elsewhere(scattered))

    def _elsewhere(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that neither host memory nor a disk has."""
        absent = [keys[at] for at in self._reader.missing(keys)]
        return list(itertools.compress(absent, map(operator.not_, self.below.contains(absent))))

    def where(self, keys: Sequence[bytes]) -> dict[Medium, Sequence[bool | None]]:
        """See `CacheClient.where`. What shared stores have is not known here."""
        has = self.below.contains(keys)
        disks = has if self.below.is_complete else [each or None for each in has]
        return {
            medium: disks if medium is Medium.DISK else [None] * len(keys) for medium in self._media
        }

    def fetch(
        self,
        keys: Sequence[bytes],
        queued: bool,
        tenant: int | None,
        announced: int,
        priority: int,
    ) -> FetchId | None:
        """See `CacheClient.fetch`. What shared stores have shows within `ANSWER_SECONDS`."""
        there, is_sure, ends = self._reader.lookup(keys), self._knows_all, False
        # Those of queued requests leave room for those whose turn has come.
        full = len(self._fetches) >= wire.MOST_FETCHES // (2 if queued else 1)
        if there == len(keys) or full:
            return None
        if is_sure:
            reach = self._reach(keys, there)
            if reach == there:
                return None  # as for most new prompts
            if reach < len(keys):
                presence = self.presence(keys[reach:])
                ends = Presence.ABSENT in presence
                if ends:
                    keys = keys[: reach + presence.index(Presence.ABSENT)]
        fetch = FetchId(self._next_fetch)
        self._next_fetch += 1
        reads = not is_sure or self.below.contains(keys[there : there + 1])[0]
        medium = self._media[0] if reads else None
        state = FetchState(
            time.monotonic(),
            len(keys),
            there,
            there,
            len(keys),
            medium,
            {} if medium is None else {medium: len(keys) - there},
            awaited=(AwaitedBlocks(there, len(keys), medium or Medium.HOST),),
        )
        self._fetches[fetch] = _ServedFetch(state, is_sure, ends)
        most = wire.MOST_KEYS
        self._line.put(wire.Fetch(fetch, list(keys[:most]), queued, tenant, announced, priority))
        self._put_more(fetch, keys[most:])
        self._line.await_answer()
        return fetch

    def _put_more(self, fetch: FetchId, keys: Sequence[bytes]) -> None:
        for part in wire.parts(keys):
            self._line.put(wire.ExtendFetch(fetch, part, False))

    def _reach(self, keys: Sequence[bytes], start: int) -> int:
        """How many of these blocks, the first `start` included, host memory, disks or other engines
        give."""
        while start < len(keys):
            rest = keys[start:] if start else keys
            more = self.below.lookup(rest) or self.announced.lookup(rest)
            if not more:
                break
            start += more
        return start

    def extend(self, fetch: FetchId, keys: Sequence[bytes]) -> bool:
        if self.state(fetch).done or self._fetches[fetch].ends:
            return False
        self._put_more(fetch, keys)
        return True

    def raise_priority(self, fetch: FetchId) -> None:
        """A request waits for a fetch that began as queued."""
        if fetch in self._fetches:
            self._line.put(wire.ExtendFetch(fetch, [], True))

    def state(self, fetch: FetchId) -> FetchState:
        known = self._fetches.get(fetch)
        if known is None:
            return FetchState(time.monotonic())
        self._look(fetch, known)
        waits = known.is_known or known.is_sure
        if not waits and time.monotonic() - known.state.begun > ANSWER_SECONDS:
            return FetchState(known.state.begun)
        return known.state

    def end(self, fetch: FetchId) -> None:
        if self._fetches.pop(fetch, None) is not None:
            self._line.put(wire.EndFetch(fetch))

    def end_all(self) -> None:
        """End all fetches."""
        for fetch in list(self._fetches):
            self.end(fetch)

    def lose(self) -> None:
        """The service is gone, and all fetches and questions with it."""
        self._fetches.clear()
        self._answers.clear()

    def hear_answer(self, message: wire.Answered) -> None:
        """The service tells what stores have."""
        self._answers.hear(message)

    def hear(self, message: wire.Fetched) -> None:
        """The service tells how far a fetch is."""
        fetch = self._fetches.get(FetchId(message.fetch))
        if fetch is not None:
            fetch.state = message.state or FetchState(fetch.state.begun)
            fetch.is_known = True

    def _look(self, fetch: FetchId, known: _ServedFetch) -> bool:
        """Read how far a fetch is. Returns whether it is known and has ended, unless the service
        has yet to extend it."""
        news = self._rows.read(fetch)
        if news is not None:
            self._line.note_answer()
            self.hear(news)
        if known.is_known and known.state.done:
            return True
        self._line.await_answer()
        return False

    @property
    def _knows_all(self) -> bool:
        """Whether a block that `below` lacks is in no lower tier."""
        return not self._media or (self.below.is_complete and not self._asks_stores)
