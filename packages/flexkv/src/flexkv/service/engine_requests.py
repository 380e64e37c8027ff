# SPDX-License-Identifier: Apache-2.0
"""What the requests of one engine do in its pool, as the service keeps it: the blocks that they use
and hold, fetch from lower tiers, and ask shared stores about."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from flexkv.client import CacheClient, FetchId, FetchState, Hold
from flexkv.service import messages as wire
from flexkv.service.lobby import RefusalError
from flexkv.service.page import EngineHolds, FetchRow, FetchRows, row_of
from flexkv.service.pool import SharedPool
from flexkv.service.pool_keys import Announcements
from flexkv.transfer.sources import LACKS_SECONDS
from flexkv.types.presence import Presence
from flexkv.types.tenants import LARGEST_TENANT, NO_TENANT

_MOST_PROMPT = 1 << 20
"""Blocks of a prompt: more than any model's context in blocks of one token."""

_MOST_NAMES = 1 << 18
"""Requests, and pins, that an engine has not ended: more than any engine has at once."""

AboutUse: TypeAlias = (
    wire.RecordUse
    | wire.Touch
    | wire.Demote
    | wire.RequestEnded
    | wire.HoldBlocks
    | wire.UnholdBlocks
)


class EngineUses:
    """Uses and holds of one engine, by its number. Single-threaded."""

    def __init__(self, pool: SharedPool, number: int, announced: Announcements) -> None:
        self._pool = pool
        self._number = number
        self._announced = announced
        self._prompt: list[bytes] = []
        self._others: list[bytes] = []
        self._requests: set[str] = set()
        self._pins: set[str] = set()

    def handle(self, message: AboutUse, tenant: int) -> None:
        """Do what the engine says. `tenant` is that of the engine, for whom its requests count,
        whatever they name. Raises RefusalError if the message is against the rules, by a fault or
        by intent."""
        cache = self._pool.cache
        match message:
            case wire.RecordUse():
                self._record(message, tenant)
            case wire.Touch():
                cache.touch(message.keys)
            case wire.Demote():
                cache.demote(message.keys)
            case wire.RequestEnded():
                request = self._own(message.request_id)
                self._announced.end_request(request)
                cache.ended(request, message.output_tokens)
                self._requests.discard(request)
            case wire.HoldBlocks():
                owner = self._own(message.owner)
                if message.kind is Hold.PIN:
                    _note(self._pins, owner, "pins")
                cache.hold(message.kind, message.keys, owner, message.seconds)
            case wire.UnholdBlocks():
                owner = self._own(message.owner)
                cache.unhold(message.kind, owner, message.keys)
                if message.kind is Hold.PIN:
                    self._pins.discard(owner)

    def clear(self) -> None:
        """The engine has left."""
        for owner in self._pins:
            self._pool.cache.unhold(Hold.PIN, owner)
        for request in self._requests:
            self._pool.cache.ended(request, 0)
        for known in (self._pins, self._requests, self._prompt, self._others):
            known.clear()

    def _own(self, name: str) -> str:
        """Names of engines do not meet."""
        return f"{self._number} {name}"

    def _record(self, message: wire.RecordUse, tenant: int) -> None:
        for known, more in (self._prompt, message.prompt), (self._others, message.others):
            if len(known) + len(more) > _MOST_PROMPT:
                raise RefusalError(f"a prompt has more than {_MOST_PROMPT} blocks")
            known.extend(more)
        context = message.context
        if context is None:
            return
        if not NO_TENANT <= context.tenant <= LARGEST_TENANT:
            raise RefusalError(f"a request has the tenant {context.tenant}")
        prompt, self._prompt = self._prompt, []
        others, self._others = self._others, []
        self._pool.prompt_blocks += len(prompt)
        self._pool.found_blocks += min(message.found, len(prompt))
        request = ""
        if context.request_id:
            request = self._own(context.request_id)
            _note(self._requests, request, "requests")
        # A conversation has its name on whichever engine it goes on.
        named = replace(context, request_id=request, tenant=tenant or context.tenant)
        self._pool.cache.record(others or prompt[: message.found], named, prompt)
        if request and context.stores and not others:
            self._announced.begin_request(request, prompt[message.found :])


def _note(names: set[str], name: str, what: str) -> None:
    names.add(name)
    if len(names) > _MOST_NAMES:
        raise RefusalError(f"the engine has more than {_MOST_NAMES} {what} that have not ended")


_UNREAD_SECONDS = 60.0
"""Fetches of an engine that has read nothing for so long end: it hangs, and what they have brought
stays in memory meanwhile."""

AboutFetch: TypeAlias = wire.Fetch | wire.ExtendFetch | wire.EndFetch


@dataclass(slots=True, eq=False)
class _OpenFetch:
    """A fetch that the engine has not ended. `id` is that of the pool's cache, None if no tier has
    a block to add or the fetch has ended there; `blocks` how many it may bring; `messages` how many
    were about it. `cut`: how many further blocks the engine wants, which it may not bring. `told`:
    the messages and the state that its row has."""

    number: int
    messages: int = 1
    id: FetchId | None = None
    blocks: int = 0
    cut: int = 0
    told: tuple[int, FetchState | None] | None = None


class EngineFetches:
    """Fetches of one engine. Single-threaded."""

    def __init__(self, cache: CacheClient, holds: EngineHolds, rows: FetchRows) -> None:
        self._cache = cache
        self._holds = holds
        self._rows = rows
        self._open: dict[int, _OpenFetch] = {}  # by row
        self._unread_since: float | None = None

    def __len__(self) -> int:
        """The number of fetches that the engine has not ended."""
        return len(self._open)

    def handle(self, message: AboutFetch, tenant: int) -> None:
        """Do what the engine says. Blocks count for `tenant` if the message names none. Raises
        RefusalError if the message is against the rules, by a fault or by intent."""
        row = row_of(message.fetch)
        fetch = self._open.get(row)
        if isinstance(message, wire.Fetch):
            if fetch is not None:
                raise RefusalError(
                    f"fetch {message.fetch} begins twice, or before another has ended"
                )
            fetch = self._open[row] = _OpenFetch(message.fetch)
            keys = self._allowed(fetch, message.keys)
            if keys:
                fetch.id = self._cache.fetch(
                    keys,
                    queued=message.queued,
                    tenant=tenant if message.tenant is None else message.tenant,
                    announced=message.announced,
                    priority=message.priority,
                )
        elif fetch is None or fetch.number != message.fetch:
            return
        elif isinstance(message, wire.EndFetch):
            self._end(fetch)
            del self._open[row]
        else:
            fetch.messages += 1
            if fetch.id is not None:
                keys = self._allowed(fetch, message.keys)
                self._cache.extend_fetch(fetch.id, keys, raise_priority=message.raise_priority)

    def tell(self) -> None:
        """Write the states that have changed to the page, where the engine reads them."""
        for fetch in self._open.values():
            state = None if fetch.id is None else self._cache.fetch_state(fetch.id)
            if state is not None and state.length and fetch.cut:
                state = replace(state, length=state.length + fetch.cut)
            news = fetch.messages, state
            if news != fetch.told:
                self._rows.write(FetchRow(fetch.number, *news))
                fetch.told = news

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

    def _allowed(self, fetch: _OpenFetch, keys: list[bytes]) -> list[bytes]:
        """As many of the keys that follow as a fetch may bring. Blocks stay in memory until it
        ends, so the limit of loads holds for them, too. Counts them."""
        others = sum(each.blocks for each in self._open.values()) - fetch.blocks
        room = 0 if fetch.cut else max(0, self._holds.room(others) - fetch.blocks)
        allowed = keys[:room]
        fetch.cut += len(keys) - len(allowed)
        fetch.blocks += len(allowed)
        return allowed

    def _end_all(self) -> None:
        """What fetches have brought may leave. For the engine they have ended."""
        for fetch in self._open.values():
            self._end(fetch)

    def _end(self, fetch: _OpenFetch) -> None:
        """Idempotent."""
        if fetch.id is not None:
            self._cache.end_fetch(fetch.id)
            fetch.id = None


_MOST = 1 << 16
"""The most blocks that wait for an answer: of the longest prompts several. Further questions get no
answer, and their blocks are misses."""

_PAUSE_SECONDS = 0.002
"""Seconds between two looks for answers, which arrive after milliseconds."""


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
