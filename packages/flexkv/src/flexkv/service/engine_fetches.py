# SPDX-License-Identifier: Apache-2.0
"""What one engine fetches from the lower tiers of its pool, and asks its shared stores, as the
service keeps it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from flexkv.client import CacheClient, FetchId, FetchState
from flexkv.service import messages as wire
from flexkv.service.lobby import RefusalError
from flexkv.service.page import EngineHolds, FetchRows, row_of
from flexkv.transfer.sources import LACKS_SECONDS
from flexkv.types.presence import Presence

_MOST_RANGES = 512
"""Ranges of awaited blocks that the state of a fetch names to an engine, which counts them."""

_UNREAD_SECONDS = 60.0
"""Fetches of an engine that has read nothing for so long end: it hangs, and what they have brought
stays in memory meanwhile."""

AboutFetch: TypeAlias = wire.Fetch | wire.ExtendFetch | wire.EndFetch


@dataclass(slots=True, eq=False)
class _OpenFetch:
    """A fetch that the engine has not ended. `id` is that of the pool's cache, None if no tier has
    a block to add or the fetch has ended there; `blocks` how many it may bring; `told` its state as
    the engine knows it. With `has_row`, the engine reads the state in its page; else it is sent."""

    has_row: bool = False
    id: FetchId | None = None
    blocks: int = 0
    told: FetchState | None = None
    is_told: bool = False


class EngineFetches:
    """Fetches of one engine. Single-threaded."""

    def __init__(self, cache: CacheClient, holds: EngineHolds, rows: FetchRows) -> None:
        self._cache = cache
        self._holds = holds
        self._rows = rows
        self._used_rows: set[int] = set()
        self._open: dict[int, _OpenFetch] = {}
        self._unread_since: float | None = None

    def __len__(self) -> int:
        """The number of fetches that the engine has not ended."""
        return len(self._open)

    def handle(self, message: AboutFetch, tenant: int) -> None:
        """Do what the engine says. Blocks count for `tenant` if the message names none. Raises
        RefusalError if the message is against the rules, by a fault or by intent."""
        if isinstance(message, wire.Fetch):
            if message.fetch in self._open:
                raise RefusalError(f"fetch {message.fetch} begins twice")
            if len(self._open) == wire.MOST_FETCHES:
                raise RefusalError(f"the engine has more than {wire.MOST_FETCHES} fetches")
            fetch = self._open[message.fetch] = self._begin(message.fetch)
            if self._may_bring(fetch, len(message.keys)):
                if message.tenant is not None:
                    tenant = message.tenant
                fetch.id = self._cache.fetch(
                    message.keys,
                    queued=message.queued,
                    tenant=tenant,
                    announced=message.announced,
                    priority=message.priority,
                )
            return
        if message.fetch not in self._open:
            return
        fetch = self._open[message.fetch]
        if isinstance(message, wire.EndFetch):
            self._end(fetch)
            self._leave_row(message.fetch, fetch)
            del self._open[message.fetch]
        if fetch.id is None:
            return
        if isinstance(message, wire.ExtendFetch):
            may = self._may_bring(fetch, len(message.keys))
            keys = message.keys if may else ()
            if may or message.raise_priority:
                self._cache.extend_fetch(fetch.id, keys, raise_priority=message.raise_priority)

    def tell(self, *, has_read: bool) -> Sequence[wire.Fetched]:
        """Let the engine know the states that have changed. Returns the messages to send: none to
        an engine that has not read all, so that a slow one gets the latest state, not each."""
        messages = []
        for number, fetch in self._open.items():
            state = None if fetch.id is None else self._cache.fetch_state(fetch.id)
            if fetch.is_told and state == fetch.told:
                continue
            message = wire.Fetched(number, _shortened(state))
            if fetch.has_row and not self._rows.write(message):
                self._leave_row(number, fetch)
            if not fetch.has_row:
                if not has_read:
                    continue
                messages.append(message)
            fetch.is_told, fetch.told = True, state
        return messages

    def look(self, now: float, *, has_read: bool) -> None:
        """End all fetches if the engine hangs. `now` is time.monotonic(); `has_read` says whether
        the engine has read all that was sent."""
        if has_read or not self._open:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = now
        elif now - self._unread_since > _UNREAD_SECONDS:
            self._end_all()

    def clear(self) -> None:
        """The engine has left."""
        self._end_all()
        self._open.clear()
        self._used_rows.clear()

    def _begin(self, number: int) -> _OpenFetch:
        row = row_of(number)
        has_row = row not in self._used_rows
        self._used_rows.add(row)
        return _OpenFetch(has_row)

    def _leave_row(self, number: int, fetch: _OpenFetch) -> None:
        if fetch.has_row:
            fetch.has_row = False
            self._used_rows.discard(row_of(number))

    def _may_bring(self, fetch: _OpenFetch, blocks: int) -> bool:
        """Whether a fetch may bring so many blocks more. They stay in memory until it ends, so the
        limit of loads holds for them, too. Counts them."""
        others = sum(each.blocks for each in self._open.values()) - fetch.blocks
        may = self._holds.allows(others, fetch.blocks + blocks)
        if may:
            fetch.blocks += blocks
        return may

    def _end_all(self) -> None:
        """What fetches have brought may leave. For the engine they have ended."""
        for fetch in self._open.values():
            self._end(fetch)

    def _end(self, fetch: _OpenFetch) -> None:
        """Idempotent."""
        if fetch.id is not None:
            self._cache.end_fetch(fetch.id)
            fetch.id = None


def _shortened(state: FetchState | None) -> FetchState | None:
    """A state that fits into a packet, whatever gaps lower tiers have."""
    if state is None or len(state.awaited) + len(state.later) <= _MOST_RANGES:
        return state
    awaited = state.awaited[:_MOST_RANGES]
    return replace(state, awaited=awaited, later=state.later[: _MOST_RANGES - len(awaited)])


_MOST = 1 << 16
"""The most blocks that wait for an answer: of the longest prompts several. Further questions get no
answer, and their blocks are misses."""

_PAUSE_SECONDS = 0.002
"""Seconds between two looks for answers, which arrive after milliseconds. Not tuned."""


class EngineQueries:
    """Queries of one engine. Single-threaded."""

    def __init__(self, cache: CacheClient) -> None:
        self._cache = cache
        self._waiting: dict[bytes, float] = {}  # until when
        self._looked_at = 0.0

    def __bool__(self) -> bool:
        """Whether an answer is owed."""
        return bool(self._waiting)

    def handle(self, message: wire.Query) -> None:
        """Ask the stores, unless too much waits."""
        keys = message.keys + message.scattered
        if len(self._waiting) + len(keys) <= _MOST:
            self._cache.query(message.keys, message.scattered)
            # A store's answer is forgotten if the pool is cleared, or if nobody looks for long.
            self._waiting |= dict.fromkeys(keys, time.monotonic() + LACKS_SECONDS)

    def answers(self, now: float) -> Iterator[wire.Answered]:
        """What is known by now, of as many blocks as a message has: a look takes part of a
        millisecond, whatever an engine asks. Each store has a deadline, after which it counts as
        empty."""
        if not self._waiting or now - self._looked_at < _PAUSE_SECONDS:
            return
        self._looked_at = now
        keys = list(islice(self._waiting, wire.MOST_KEYS))
        there, absent = [], []
        for key, presence in zip(keys, self._cache.presence(keys), strict=True):
            until = self._waiting.pop(key)
            if presence is Presence.UNKNOWN:
                if until > now:
                    self._waiting[key] = until  # to its end
            elif presence is Presence.ABSENT:
                absent.append(key)
            else:
                there.append(key)
        if there or absent:
            yield wire.Answered(there, absent)

    def clear(self) -> None:
        """The engine has left."""
        self._waiting.clear()
