# SPDX-License-Identifier: Apache-2.0
"""The tiers below the memory of a pool, as one of its engines sees them, and its fetches."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flexkv.client import AwaitedBlocks, FetchId, FetchState
from flexkv.index.block_index import IndexReader
from flexkv.index.key_set import KeySet
from flexkv.service import messages as wire
from flexkv.service.line import Line
from flexkv.service.page import FETCH_ROWS, FetchRows, row_of
from flexkv.transfer.sources import ANSWERS, HAS_SECONDS, LACKS_SECONDS
from flexkv.types.changes import Medium
from flexkv.types.presence import Presence, presence_below

ANSWER_SECONDS = 0.05
"""Seconds that a request waits for the service to say what shared stores have."""


class _Answer(NamedTuple):
    """What the service has said of a block, by time.monotonic(), or when it was asked."""

    has: bool = False
    until: float = 0.0
    queried: float = -math.inf


_UNKNOWN = _Answer()


class StoreAnswers:
    """What an engine knows of its pool's shared stores, by questions to the service.
    Single-threaded; no call waits. An answer is awaited for `ANSWER_SECONDS`. Then the block
    counts as absent, until there is one or `LACKS_SECONDS` are over."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._known: dict[bytes, _Answer] = {}  # the latest last

    def has(self, key: bytes, now: float) -> bool | None:
        """Whether a store has the block of `key` at time.monotonic() `now`; None if that is unknown
        and may become known."""
        known = self._known.get(key, _UNKNOWN)
        if known.until > now:
            return known.has
        is_late = ANSWER_SECONDS < now - known.queried <= LACKS_SECONDS
        return False if is_late else None

    def ask(self, keys: Sequence[bytes], scattered: Sequence[bytes]) -> bool:
        """Ask about blocks of which `has` does not know. Returns whether an answer is awaited. The
        arguments are those of `CacheClient.query`."""
        now = time.monotonic()
        unknown = {key for key in (*keys, *scattered) if self.has(key, now) is None}
        # Those that nobody has asked about, or that got no answer for long.
        since = now - LACKS_SECONDS
        new = {key for key in unknown if self._known.get(key, _UNKNOWN).queried < since}
        first = [key for key in keys if key in new]
        others = [key for key in scattered if key in new]
        for part in wire.parts(first):
            self._line.put(wire.Query(part, []))
        for part in wire.parts(others):
            self._line.put(wire.Query([], part))
        self._note((*first, *others), _Answer(queried=now))
        if new:
            self._line.await_answer()
        return bool(unknown)

    def hear(self, message: wire.Answered) -> None:
        """The service answers."""
        now = time.monotonic()
        for has, keys in ((True, message.there), (False, message.absent)):
            until = now + (HAS_SECONDS if has else LACKS_SECONDS)
            self._note(keys, _Answer(has, until))

    def clear(self) -> None:
        """The service is gone, and with it all answers that it owed."""
        self._known.clear()

    def _note(self, keys: Iterable[bytes], answer: _Answer) -> None:
        for key in keys:
            self._known.pop(key, None)
            self._known[key] = answer
        while len(self._known) > ANSWERS:
            del self._known[next(iter(self._known))]


@dataclass(slots=True, eq=False)
class _ServedFetch:
    """A fetch. `state` is what the service has answered to all `messages` about it (`is_current`),
    or what is expected of it. `is_sure`: a disk had its blocks when it began. `ends`: no tier had
    the block that follows."""

    id: FetchId
    state: FetchState
    is_sure: bool
    ends: bool
    messages: int = 0
    is_known: bool = False
    is_current: bool = False


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
        self._answers = StoreAnswers(line)
        self._fetches: dict[int, _ServedFetch] = {}  # by row
        self._next_fetch = 1

    @property
    def awaits_news(self) -> bool:
        """Whether the service is to tell, several times a second, how far a fetch is."""
        return any(not self._look(each) for each in self._fetches.values())

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
        full = len(self._fetches) >= FETCH_ROWS // (2 if queued else 1)
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
        while row_of(self._next_fetch) in self._fetches:
            self._next_fetch += 1
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
            medium or Medium.HOST,  # until the service answers
            {} if medium is None else {medium: len(keys) - there},
            awaited=(AwaitedBlocks(there, len(keys), medium or Medium.HOST),),
            reach=len(keys),
        )
        made = _ServedFetch(fetch, state, is_sure, ends)
        first, *more = wire.parts(keys)
        if not self._put(made, wire.Fetch(fetch, first, queued, tenant, announced, priority)):
            return None
        self._fetches[row_of(fetch)] = made
        for part in more:
            self._put(made, wire.ExtendFetch(fetch, part, False))
        return fetch

    def _put(self, fetch: _ServedFetch, message: wire.Fetch | wire.ExtendFetch) -> bool:
        is_put = self._line.put(message)
        if is_put:
            self._line.await_answer()
            fetch.messages += 1
            fetch.is_current = False
        return is_put

    def _find(self, fetch: FetchId) -> _ServedFetch | None:
        known = self._fetches.get(row_of(fetch))
        return known if known is not None and known.id == fetch else None

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

    def extend(self, fetch: FetchId, keys: Sequence[bytes], *, raise_priority: bool) -> bool:
        """See `CacheClient.extend_fetch`. Until the service answers, the blocks count as coming."""
        state, known = self.state(fetch), self._find(fetch)
        if known is None:
            return False
        goes_on = not (state.done and not state.is_short) and not (known.ends and keys)
        if goes_on or raise_priority:
            for part in (*wire.parts(keys if goes_on else ()),) or ([],):
                if not self._put(known, wire.ExtendFetch(fetch, part, raise_priority)):
                    return False  # no answer comes
        if goes_on and (keys or state.is_short):
            length, stop = state.length + len(keys), state.reach + len(keys)
            medium = next(iter(self._media), Medium.HOST)
            known.state = replace(state, length=length, stop=stop, reach=stop, queried=medium)
        return goes_on

    def state(self, fetch: FetchId) -> FetchState:
        known = self._find(fetch)
        if known is None:
            return FetchState(time.monotonic())
        self._look(known)
        waits = known.is_known or known.is_sure
        if not waits and time.monotonic() - known.state.begun > ANSWER_SECONDS:
            return FetchState(known.state.begun)
        return known.state

    def end(self, fetch: FetchId) -> None:
        if self._find(fetch) is not None:
            del self._fetches[row_of(fetch)]
            self._line.put(wire.EndFetch(fetch))

    def end_all(self) -> None:
        """End all fetches."""
        for fetch in list(self._fetches.values()):
            self.end(fetch.id)

    def lose(self) -> None:
        """The service is gone, and all fetches and questions with it."""
        self._fetches.clear()
        self._answers.clear()

    def hear_answer(self, message: wire.Answered) -> None:
        """The service tells what stores have."""
        self._answers.hear(message)

    def _look(self, fetch: _ServedFetch) -> bool:
        """Read how far a fetch is. Returns whether it is known and has ended."""
        news = self._rows.read(fetch.id)
        if news is not None:
            self._line.note_answer()
            if news.fetch == fetch.id and news.messages == fetch.messages:
                fetch.state = news.state or FetchState(fetch.state.begun)
                fetch.is_known = fetch.is_current = True
        if fetch.is_current and fetch.state.done:
            return True
        self._line.await_answer()
        return False

    @property
    def _knows_all(self) -> bool:
        """Whether a block that `below` lacks is in no lower tier."""
        return not self._media or (self.below.is_complete and not self._asks_stores)
