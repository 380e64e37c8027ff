# SPDX-License-Identifier: Apache-2.0
"""Follows SGLang's requests from lookup to end: their parameters, hits and conversations.

A linker sees hashes of the pages that SGLang lacks, and neither requests nor answers. SGLang's
matches and the batches of its scheduler have the rest.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flexkv.client import CacheClient, FetchState, Hold
from flexkv.engine.choice.chooser import Left
from flexkv.engine.scheduler.options import (
    NONE,
    OptionsReader,
    RequestOptions,
    pin_owner,
    tenant_of,
)
from flexkv.engine.scheduler.reports import HitReports
from flexkv.engine.scheduler.request import Match
from flexkv.engine.scheduler.spans import TracedWork
from flexkv.types.changes import Medium
from flexkv.types.packed_keys import PackedKeys
from flexkv_sglang.page_keys import PageKeys
from flexkv_sglang.sglang_request import SglangRequest
from flexkv_sglang.spans import spans_of_process
from flexkv_sglang.trailing import NONE_TRAILING, TrailingPages

_LOOK_SECONDS = 1.0
"""Seconds between two checks for ended requests. A check costs one call per running request. Not
tuned."""

_UNSCHEDULED = 64
"""Requests that left unscheduled, before these are searched for. Not tuned."""

_PARAMETERS = (
    "load",
    "max_load_tokens",
    "pin",
    "pin_seconds",
    "pin_name",
    "unpin",
    "session",
    "returns",
    "retain_seconds",
    "release",
    "priority",
    "demote",
)
"""Parameters of requests that FlexKV follows in SGLang's `custom_params`. SGLang stores pages of
its tree, which have no request, and loads in one way."""


class Hashes(Protocol):
    """See `PageHashes`."""

    def of_hit(self, request: Any) -> Sequence[str]: ...
    def behind(self, request: Any, pages: int, before: str | None) -> Sequence[str]: ...


@dataclass(slots=True)
class _Lookup:
    """The latest lookup of a waiting request.

    Attributes:
        keys: keys of the pages that SGLang lacks.
        last: the hash of the last of them; empty if there are none.
        may_load: whether the request may load any.
        left: why loadable pages are not loaded, and how many tokens they have.
        loads: how many of the pages are loaded.
        fetched: how many of these came from each lower tier.
    """

    keys: PackedKeys
    last: str = ""
    may_load: bool = True
    left: tuple[tuple[Left, int], ...] = ()
    loads: int = 0
    fetched: Mapping[Medium, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Followed:
    """A request that has not ended.

    Attributes:
        request: the request.
        options: its parameters.
        own_tokens: tokens that SGLang had for it at its latest match.
        keys: keys of its first pages, as far as they are known.
        last: the hash of the last of these pages; None if there are none.
        runs: whether it was computed.
    """

    request: SglangRequest
    options: RequestOptions
    own_tokens: int = 0
    keys: PackedKeys | None = None
    last: str | None = None
    runs: bool = False

    @property
    def keeps(self) -> bool:
        """Whether its blocks are pinned or retained."""
        return self.options.pin or self.options.retain_seconds is not None


def options_reader(allowed: Collection[str] | None) -> OptionsReader:
    """A reader of the parameters of SGLang's requests. `allowed`: the setting `request_options`;
    None for all."""
    return OptionsReader(allowed, _PARAMETERS, "custom_params")


class FollowedRequests:
    """The requests of one engine, on the rank that decides. Single-threaded.

    Args:
        cache: learns of the requests; borrowed.
        page_keys: makes the keys of blocks; borrowed.
        reports: gets the requests.
        options: reads their parameters.
        page_size: tokens of a block.
        trailing: the pages of which a hit needs the last.

    Attributes:
        keeping: how many requests that run pin or retain their blocks.
        traced: the loads and fetches that have spans.
    """

    def __init__(
        self,
        cache: CacheClient,
        page_keys: PageKeys,
        reports: HitReports,
        options: OptionsReader,
        *,
        page_size: int,
        trailing: TrailingPages = NONE_TRAILING,
    ) -> None:
        self.keeping = 0
        self.traced = TracedWork(spans_of_process())
        self._cache = cache
        self._page_size = page_size
        self._keys_of = page_keys.of
        self._reports = reports
        self._options = options
        self._trailing = trailing
        self._lookups: dict[str, _Lookup] = {}
        self._followed: dict[str, _Followed] = {}
        self._hashes: Hashes | None = None
        self._checked = time.monotonic()

    # Requests that wait.

    def matched(self, request: Any, own_tokens: int) -> None:
        """SGLang has searched its own cache for a request, and looks it up next.

        Args:
            request: SGLang's request; borrowed until it ends.
            own_tokens: tokens that SGLang has for it.
        """
        self._follow(request).own_tokens = own_tokens

    def own_tokens(self, rid: str) -> int:
        """Tokens that SGLang has for a request; 0 if that is unknown."""
        followed = self._followed.get(rid)
        return 0 if followed is None else followed.own_tokens

    def priority_of(self, rid: str) -> int:
        """The priority of a request; 0 if it is unknown."""
        followed = self._followed.get(rid)
        return 0 if followed is None else followed.options.priority or 0

    def limit(self, request: Any) -> int | None:
        """The most tokens to load for a request; None for no limit."""
        options = self._follow(request).options
        return options.max_load_tokens if options.load else 0

    def looked_up(self, rid: str, keys: PackedKeys, last: str) -> int:
        """Note the latest lookup of a request.

        Args:
            rid: the request.
            keys: keys of the pages that SGLang lacks.
            last: the hash of the last of them.

        Returns:
            How many of the pages may be loaded.
        """
        followed = self._followed.get(rid)
        options = NONE if followed is None else followed.options
        self._lookups[rid] = _Lookup(keys, last, options.load)
        most = options.max_load_tokens
        pages = len(keys) if most is None else min(len(keys), most // self._page_size)
        return pages if options.load else 0

    def left(self, rid: str, reason: Left, pages: int) -> None:
        """Note that loadable pages of the latest lookup of a request are computed, and why."""
        self._lookups[rid].left = ((reason, pages * self._page_size),)

    def forget_keys(self) -> None:
        """Forget all lookups: from now on, keys have another end."""
        self._lookups.clear()
        for followed in self._followed.values():
            followed.keys, followed.last = None, None

    def fetched(self, rid: str, state: FetchState) -> None:
        """Note that a fetch of a request has ended."""
        self.traced.fetched(self._request_of(rid), state)

    def loads(self, rid: str, pages: int, fetched: Mapping[Medium, int], transfer_id: int) -> None:
        """Note that a request loads its first `pages` pages of the latest lookup, by a transfer.
        `fetched`: how many of these came from each lower tier."""
        self.traced.began(transfer_id, self._request_of(rid), pages)
        lookup = self._lookups.setdefault(rid, _Lookup(self._keys_of(())))
        lookup.loads, lookup.fetched = pages, fetched

    def cancelled(self, rid: str) -> None:
        """Note that a request loads nothing. Idempotent."""
        lookup = self._lookups.get(rid)
        if lookup is not None:
            lookup.loads, lookup.fetched = 0, {}

    # Requests that run.

    def batch(self, requests: Sequence[Any], waiting: Sequence[Any], hashes: Hashes) -> None:
        """Report a batch that SGLang computes next, and the requests that have ended.

        Args:
            requests: SGLang's requests of the batch; borrowed until they end.
            waiting: the requests in SGLang's queue. Any others that do not run are forgotten in
                time.
            hashes: of pages; borrowed until the next call.
        """
        self._hashes = hashes
        for request in requests:
            followed = self._follow(request)
            lookup = self._lookups.pop(request.rid, None)
            # SGLang computes a long prompt in chunks, and resumes requests that it had retracted.
            if not followed.runs or (lookup is not None and lookup.loads):
                self._began(followed, lookup, hashes)
        if len(self._lookups) > 2 * len(waiting) + _UNSCHEDULED:
            known = {each.rid for each in waiting}
            self._lookups = {rid: each for rid, each in self._lookups.items() if rid in known}
        now = time.monotonic()
        if now - self._checked >= _LOOK_SECONDS:
            self._checked = now
            self._end_all(waiting)

    def close(self) -> None:
        """Report the end of all requests and close the recorder."""
        self._end_all(None)
        self._reports.close()

    def _request_of(self, rid: str) -> SglangRequest | None:
        followed = self._followed.get(rid)
        return None if followed is None else followed.request

    def _follow(self, request: Any) -> _Followed:
        """The state of a request. It begins with the first call."""
        followed = self._followed.get(request.rid)
        if followed is not None and followed.request.sglang is request:
            return followed
        if followed is not None:
            self._end(followed)  # an earlier one of the same id
        seen = SglangRequest(request)
        followed = self._followed[request.rid] = _Followed(seen, self._options.of(seen))
        if followed.options.unpin:
            self._cache.unhold(Hold.PIN, pin_owner(seen, followed.options))
        return followed

    def _began(self, followed: _Followed, lookup: _Lookup | None, hashes: Hashes) -> None:
        asked = lookup is not None and lookup.may_load
        lookup = lookup or _Lookup(self._keys_of(()))
        request, size, loads = followed.request, self._page_size, lookup.loads
        own_tokens = max(0, request.num_computed_tokens - loads * size)
        own_hashes = hashes.of_hit(request.sglang) if own_tokens else ()
        if len(own_hashes) != own_tokens // size:
            own_hashes = ()  # those of a streaming session are unknown
        own = self._keys_of(own_hashes)
        prompt, last = own + lookup.keys, lookup.last
        if len(prompt) > max(0, request.num_prompt_tokens - 1) // size:
            # The lookup is older than SGLang's own hit.
            prompt, last = own + lookup.keys[:loads], ""
        if len(own) == own_tokens // size:
            followed.keys = prompt if last else own
            followed.last = last or next(reversed(own_hashes), None)
        used: Sequence[bytes] = prompt[: len(own) + loads]
        if self._trailing:
            used = [*used, *self._trailing.keys_of_hit(used)]
        if not followed.runs:
            followed.runs = True
            self.keeping += followed.keeps
        self._reports.allocated(
            request,
            followed.options,
            Match(own_tokens, left=lookup.left),
            loads * size,
            keys=(used, prompt),
            fetched={medium: count * size for medium, count in lookup.fetched.items()}
            if asked
            else None,
        )
        self._keep(followed, prompt)

    def _keep(self, followed: _Followed, keys: PackedKeys) -> None:
        """Pin or retain the blocks of a prefix that host memory has."""
        request, options = followed.request, followed.options
        if not (followed.keeps and keys):
            return
        all_keys = [*keys, *self._trailing.keys_of_hit(keys)]
        if options.pin:
            self._cache.hold(Hold.PIN, all_keys, pin_owner(request, options), options.pin_seconds)
        if options.retain_seconds is not None:
            self._cache.hold(Hold.RETAIN, all_keys, tenant_of(request), options.retain_seconds)

    def _end_all(self, waiting: Sequence[Any] | None) -> None:
        """Report the requests that have ended; all if SGLang's queue is None. Forget those that
        left it without having been computed."""
        queue = None if waiting is None else {id(each) for each in waiting}
        for followed in [*self._followed.values()]:
            if queue is None or _has_ended(followed, queue):
                self._end(followed)

    def _end(self, followed: _Followed) -> None:
        request, options = followed.request, followed.options
        del self._followed[request.request_id]
        if not followed.runs:
            return
        self.keeping -= followed.keeps
        made: list[PackedKeys] = []

        def all_keys() -> PackedKeys:
            if not made:
                made.append(self._keys_at_end(followed))
            return made[0]

        self._reports.ended(request, all_keys)  # first: SGLang may fail to hash the pages
        if followed.keeps:
            self._keep(followed, all_keys())
        if options.release or options.demote:
            keys = all_keys()
            own = [*keys, *self._trailing.keys_behind(keys)]
            if options.release:
                self._cache.unhold(Hold.RETAIN, tenant_of(request), own)
            if options.demote:
                self._cache.demote(own)

    def _keys_at_end(self, followed: _Followed) -> PackedKeys:
        """The keys of all pages of a request's prompt and answer."""
        known = self._keys_of(()) if followed.keys is None else followed.keys
        if self._hashes is None:
            return known
        request = followed.request.sglang
        behind = self._hashes.behind(request, len(known), followed.last if known else None)
        return known + self._keys_of(behind)


def _has_ended(followed: _Followed, queue: set[int]) -> bool:
    """Whether a request has ended. SGLang drops an aborted request from its queue without a mark.
    `queue`: the identities of the requests in it."""
    request = followed.request.sglang
    if request.is_retracted or not followed.runs:
        return id(request) not in queue
    ended: bool = request.finished()
    return ended
