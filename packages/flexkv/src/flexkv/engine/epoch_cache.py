# SPDX-License-Identifier: Apache-2.0
"""A cache that engines share, for an adapter whose engine makes the keys."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from flexkv.client import CacheClient, CacheInfo, CacheStatus, FetchId, Hold, Reset, Transfer
from flexkv.engine.key_epoch import KeyEpoch
from flexkv.eviction import UNKNOWN_REQUEST, RequestContext
from flexkv.figures.counters import ResetCause
from flexkv.types.changes import Changes, Medium
from flexkv.types.presence import Presence


class EpochCache:
    """A `CacheClient` over one that others share. A reset begins another epoch of keys: this engine
    finds no block of before, and the others keep theirs. Single-threaded.

    Args:
        cache: the shared cache; owned.
        alone: whether the engine's keys mean something else in other engines. Then no epoch is
            shared.
        epoch: that of the keys; None for one of this object's own.
    """

    def __init__(self, cache: CacheClient, *, alone: bool, epoch: KeyEpoch | None = None) -> None:
        self._cache = cache
        self._epoch = epoch or KeyEpoch()
        if alone:
            self._epoch.renew()
        # What has no keys is the cache's own.
        self.end_transfer = cache.end_transfer
        self.fetch_state = cache.fetch_state
        self.end_fetch, self.ended = cache.end_fetch, cache.ended
        self.poll, self.watch, self.figures = cache.poll, cache.watch, cache.figures
        self.close, self.sync = cache.close, cache.sync

    @property
    def epoch(self) -> KeyEpoch:
        """The epoch of the keys."""
        return self._epoch

    @property
    def info(self) -> CacheInfo:
        """See `CacheClient.info`."""
        return self._cache.info

    @property
    def busy(self) -> bool:
        """See `CacheClient.busy`."""
        return self._cache.busy

    @property
    def status(self) -> CacheStatus:
        """See `CacheClient.status`."""
        return self._cache.status

    def lookup(self, keys: Sequence[bytes]) -> int:
        """See `CacheClient.lookup`."""
        return self._cache.lookup(self._own(keys))

    def presence(self, keys: Sequence[bytes]) -> Sequence[Presence]:
        """See `CacheClient.presence`."""
        return self._cache.presence(self._own(keys))

    def where(self, keys: Sequence[bytes]) -> Mapping[Medium, Sequence[bool | None]]:
        """See `CacheClient.where`."""
        return self._cache.where(self._own(keys))

    def missing(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        """See `CacheClient.missing`."""
        return self._cache.missing(self._own(keys), start)

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> bool:
        """See `CacheClient.query`."""
        return self._cache.query(self._own(keys), self._own(scattered))

    def load(self, keys: Sequence[bytes]) -> Transfer | None:
        """See `CacheClient.load`."""
        return self._engines(self._cache.load(self._own(keys)))

    def fetch(
        self,
        keys: Sequence[bytes],
        *,
        queued: bool = False,
        tenant: int | None = None,
        announced: int = 0,
        priority: int = 0,
    ) -> FetchId | None:
        """See `CacheClient.fetch`."""
        own = self._own(keys)
        return self._cache.fetch(
            own, queued=queued, tenant=tenant, announced=announced, priority=priority
        )

    def extend_fetch(
        self, fetch: FetchId, keys: Sequence[bytes] = (), *, raise_priority: bool = False
    ) -> bool:
        """See `CacheClient.extend_fetch`."""
        return self._cache.extend_fetch(fetch, self._own(keys), raise_priority=raise_priority)

    def store(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Collection[int] = (0,),
        *,
        held: bool = False,
        tenants: Sequence[int] | None = None,
    ) -> Transfer | None:
        """See `CacheClient.store`."""
        own = self._own(keys)
        return self._engines(
            self._cache.store(own, positions, prefix_starts, held=held, tenants=tenants)
        )

    def record(
        self,
        keys: Sequence[bytes],
        context: RequestContext = UNKNOWN_REQUEST,
        prompt: Sequence[bytes] | None = None,
    ) -> None:
        """See `CacheClient.record`."""
        self._cache.record(self._own(keys), context, None if prompt is None else self._own(prompt))

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `CacheClient.touch`."""
        self._cache.touch(self._own(keys))

    def hold(
        self,
        kind: Hold,
        keys: Sequence[bytes],
        owner: Hashable = None,
        seconds: float | None = None,
    ) -> None:
        """See `CacheClient.hold`."""
        self._cache.hold(kind, self._own(keys), owner, seconds)

    def unhold(self, kind: Hold, owner: Hashable = None, keys: Sequence[bytes] = ()) -> bool:
        """See `CacheClient.unhold`."""
        return self._cache.unhold(kind, owner, self._own(keys))

    def demote(self, keys: Sequence[bytes]) -> None:
        """See `CacheClient.demote`."""
        self._cache.demote(self._own(keys))

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `CacheClient.remove`."""
        return self._cache.remove(self._own(keys))

    def drain_changes(self) -> list[Changes]:
        """See `CacheClient.drain_changes`. Blocks of other epochs, which this engine does not find,
        are left out."""
        return [
            Changes(
                each.medium,
                self._of_epoch(each.removed),
                self._of_epoch(each.added),
                dict(zip(self._of_epoch(each.texts), self._texts(each.texts), strict=True)),
            )
            for each in self._cache.drain_changes()
        ]

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        """See `CacheClient.describe`."""
        end = self._epoch.end
        self._cache.describe({key + end: text for key, text in described.items()})

    def reset(self, kind: Reset, cause: str = ResetCause.REQUEST) -> None:
        """See `CacheClient.reset`."""
        self._cache.reset(kind, cause)
        if kind in (Reset.CLEAR, Reset.RENEW):
            self._epoch.renew()

    def _own(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        end = self._epoch.end
        return [key + end for key in keys] if end else keys

    def _engines(self, transfer: Transfer | None) -> Transfer | None:
        """A transfer with the keys that the engine knows."""
        end = len(self._epoch.end)
        if transfer is None or not end:
            return transfer
        return replace(transfer, keys=[key[:-end] for key in transfer.keys])

    def _texts(self, texts: Mapping[bytes, bytes]) -> list[bytes]:
        return [text for key, text in texts.items() if self._epoch.has(key)]

    def _of_epoch(self, keys: Iterable[bytes]) -> list[bytes]:
        end = len(self._epoch.end)
        own = filter(self._epoch.has, keys)
        return [key[:-end] for key in own] if end else list(own)


def epoch_of(cache: CacheClient) -> KeyEpoch:
    """The epoch of the keys of a cache that `of_epochs` has made."""
    return cache.epoch if isinstance(cache, EpochCache) else KeyEpoch()


def of_epochs(cache: CacheClient, *, alone: bool) -> CacheClient:
    """A cache whose resets leave other engines their blocks: `cache`, if it has no others. `alone`:
    see `EpochCache`."""
    return EpochCache(cache, alone=alone) if cache.info.is_shared else cache
