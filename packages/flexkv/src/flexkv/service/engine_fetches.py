# SPDX-License-Identifier: Apache-2.0
"""The fetches of one engine from the lower tiers of its pool, as the service keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from flexkv.client import CacheClient, FetchId, FetchState
from flexkv.service import messages as wire
from flexkv.service.engine_holds import EngineHolds
from flexkv.service.lobby import RefusalError

_MOST_RANGES = 512
"""Ranges of awaited blocks that the state of a fetch names to an engine, which counts them. Not
tuned."""

_UNREAD_SECONDS = 60.0
"""Fetches of an engine that has read nothing for so long end: it hangs, and what they have brought
stays in memory meanwhile. Not tuned."""

AboutFetch: TypeAlias = wire.Fetch | wire.ExtendFetch | wire.RaiseFetch | wire.EndFetch


@dataclass(slots=True, eq=False)
class _OpenFetch:
    """A fetch that the engine has not ended.

    Attributes:
        id: of the pool's cache; None if no tier has a block to add, or if it has ended there.
        blocks: how many it may bring.
        told: its state as the engine knows it.
        is_told: whether the engine knows it.
    """

    id: FetchId | None = None
    blocks: int = 0
    told: FetchState | None = None
    is_told: bool = False


class EngineFetches:
    """Single-threaded.

    Args:
        cache: of the pool; borrowed.
        holds: of the engine; borrowed.
    """

    def __init__(self, cache: CacheClient, holds: EngineHolds) -> None:
        self._cache = cache
        self._holds = holds
        self._open: dict[int, _OpenFetch] = {}
        self._unread_since: float | None = None

    def __len__(self) -> int:
        """The number of fetches that the engine has not ended."""
        return len(self._open)

    def handle(self, message: AboutFetch, tenant: int) -> None:
        """Do what the engine says.

        Args:
            message: what it says.
            tenant: for whom blocks count if the message names none.

        Raises:
            RefusalError: it is against the rules, by a fault or by intent.
        """
        if isinstance(message, wire.Fetch):
            if message.fetch in self._open:
                raise RefusalError(f"fetch {message.fetch} begins twice")
            fetch = self._open[message.fetch] = _OpenFetch()
            if self._may_bring(fetch, len(message.keys)):
                if message.tenant is not None:
                    tenant = message.tenant
                fetch.id = self._cache.fetch(message.keys, queued=message.queued, tenant=tenant)
            return
        fetch = self._open.get(message.fetch, _OpenFetch())
        if isinstance(message, wire.EndFetch):
            self._open.pop(message.fetch, None)
        if fetch.id is None:
            return
        match message:
            case wire.ExtendFetch():
                if self._may_bring(fetch, len(message.keys)):
                    self._cache.extend_fetch(fetch.id, message.keys)
            case wire.RaiseFetch():
                self._cache.raise_priority(fetch.id)
            case wire.EndFetch():
                self._cache.end_fetch(fetch.id)

    def drain_news(self) -> Iterator[wire.Fetched]:
        """The states that have changed since the last call."""
        for number, fetch in self._open.items():
            state = None if fetch.id is None else self._cache.fetch_state(fetch.id)
            if not fetch.is_told or state != fetch.told:
                fetch.is_told, fetch.told = True, state
                yield wire.Fetched(number, _shortened(state))

    def look(self, now: float, *, has_read: bool) -> None:
        """End all fetches if the engine hangs.

        Args:
            now: time.monotonic().
            has_read: whether the engine has read all that was sent.
        """
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
            if fetch.id is not None:
                self._cache.end_fetch(fetch.id)
                fetch.id = None


def _shortened(state: FetchState | None) -> FetchState | None:
    """A state that fits into a packet, whatever gaps lower tiers have."""
    if state is None or len(state.awaited) <= _MOST_RANGES:
        return state
    return replace(state, awaited=state.awaited[:_MOST_RANGES])
