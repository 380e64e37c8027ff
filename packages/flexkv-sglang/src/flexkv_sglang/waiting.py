# SPDX-License-Identifier: Apache-2.0
"""The requests in SGLang's queue: what lower tiers read for them, and which of them must wait.

A prompt of 32,768 tokens in pages of one token takes SGLang 4 ms to hash, and a fetch of all its
blocks 150 ms to begin. Decoding would stop meanwhile, for each request of a burst. Pages are
therefore hashed and fetched a few in each step.

SGLang keeps loaded pages to their request until its forward pass has ended. Requests of one batch
with the same prefix would each load a copy of it: one loads while the others wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from flexkv.client import CacheClient
from flexkv.engine.boundary import ErrorBoundary, in_turns
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.engine.scheduler.fetches import Fetches, fetched_blocks
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.engine.scheduler.spans import OtelSpans
from flexkv.types.changes import Medium
from flexkv_sglang.hashes import PromptPages
from flexkv_sglang.request import Tracked
from flexkv_sglang.trailing import OBTAINABLE, TrailingPages


class SharedPrefixes:
    """The waiting requests of one engine, by the first page that SGLang's own cache lacks.
    Single-threaded.

    Of the requests with the same first page, one is scheduled while the others wait. If it loads
    the page, they wait until SGLang's own cache has the page. If it computes the page, they wait no
    longer. `is_loadable`: returns whether host memory has the page of this hash.
    """

    def __init__(self, is_loadable: Callable[[str], bool]) -> None:
        self._is_loadable = is_loadable
        self._first: dict[str, tuple[str, Hashable]] = {}
        self._loading: dict[str, tuple[str, int]] = {}
        self._computed: set[str] = set()
        self._unsure: set[str] = set()

    def waits(self, rid: str, page: str, kind: Hashable) -> None:
        """A request waits, of whose pages SGLang's own cache lacks `page` first. SGLang may
        schedule requests of one kind before those of another."""
        self._first[rid] = page, kind

    def is_unsure(self, rid: str) -> bool:
        """Whether the first missing page of a request was known and is no longer, because loads
        have ended since; once for each such change."""
        unsure = rid in self._unsure
        self._unsure.discard(rid)
        return unsure

    def loads(self, rid: str, page: str, batch: int) -> None:
        """A request loads pages from this one on, in the batch of this number."""
        self._loading[page] = rid, batch

    def cancelled(self, rid: str) -> None:
        """A request does not load its pages. Idempotent."""
        self._loading = {page: load for page, load in self._loading.items() if load[0] != rid}

    def scheduled(self, rids: Sequence[str]) -> None:
        """SGLang computes these requests next. Loads are known already."""
        for rid in rids:
            page, _ = self._first.pop(rid, ("", None))
            if page and page not in self._loading:
                self._computed.add(page)

    def end_loads(self, batch: int) -> None:
        """The loads of all batches up to this one have ended: SGLang's own cache has their pages,
        or never gets them."""
        ended = {page for page, (_, number) in self._loading.items() if number <= batch}
        for page in ended:
            del self._loading[page]
        self._unsure |= {rid for rid, (page, _) in self._first.items() if page in ended}
        for rid in self._unsure:
            self._first.pop(rid, None)

    def held(self, rids: Sequence[str], others: Sequence[bool]) -> list[bool]:
        """Which of the waiting requests, in the order of SGLang's queue, SGLang must not schedule
        yet. All others are forgotten. `others`: which of them wait for another reason."""
        first: dict[str, tuple[str, Hashable]] = {}
        leaders: dict[tuple[str, Hashable], bool | None] = {}
        held = list(others)
        for place, rid in enumerate(rids):
            group = self._first.get(rid)
            if group is not None:
                first[rid] = group
                if not held[place]:
                    held[place] = self._waits(group, leaders)
        self._first = first
        self._unsure.intersection_update(rids)
        self._computed.intersection_update(page for page, _ in first.values())
        return held

    def clear(self) -> None:
        """Forget all requests and loads."""
        self._first.clear()
        self._unsure.clear()
        self._loading.clear()
        self._computed.clear()

    def _waits(
        self, group: tuple[str, Hashable], leaders: dict[tuple[str, Hashable], bool | None]
    ) -> bool:
        """Whether the next request of a group waits. `leaders`: the groups of earlier requests that
        do not, and whether the others of the group wait for them, once that is known."""
        page, _ = group
        if page in self._loading:
            return True
        if group not in leaders:
            leaders[group] = None
            return False
        waits = leaders[group]
        if waits is None:
            waits = leaders[group] = page not in self._computed and self._is_loadable(page)
        return waits


WINDOW = 64
"""The most waiting requests that are looked up ahead of their turn, so that disks read for them
while SGLang computes others. Larger than a batch of prompts; their fetches keep blocks in host
memory."""

_SECONDS = 0.001
"""Seconds of a step after which no further pages are looked up. With the last portion it takes
less than 2 ms, a tenth of a step that decodes."""

_HASHED_PAGES = 512
"""Pages that are hashed at once: about 0.1 ms."""

_FETCHED_PAGES = 96
"""Pages whose fetch begins at once: about 0.4 ms, in part to wake a disk's thread. With 128, more
than 5 of 100 steps took more than 2 ms."""


@dataclass(slots=True, eq=False)
class _Look:
    """A request whose pages are looked up, from the first that SGLang lacks on.

    Attributes:
        hashed: how many pages are hashed.
        before: the hash of the last of them.
        keys: keys of hashed pages whose fetch has not begun.
        last: the key of the page before them.
        seen: keys of all hashed pages, if a hit needs trailing pages.
        trailing: the same request, with the fetch of its trailing pages; None until the end of the
            prefix is known.
        end: pages of the prefix that has these trailing pages.
    """

    tracked: Tracked
    prompt: PromptPages
    hashed: int = 0
    before: str | None = None
    keys: Sequence[bytes] = ()
    last: Sequence[bytes] = ()
    seen: list[bytes] = field(default_factory=list)
    trailing: TrackedRequest | None = None
    end: int = 0


@in_turns
class WaitingRequests:
    """The waiting requests of one engine, on the rank that decides; `shared` are those whose first
    missing page another request loads. Single-threaded, but for operators; see `in_turns`."""

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        *,
        page_size: int,
        keys_of: Callable[[Sequence[str]], Sequence[bytes]],
        boundary: ErrorBoundary,
        trailing: TrailingPages,
        spans: OtelSpans | None,
    ) -> None:
        self.shared = SharedPrefixes(lambda page: bool(cache.lookup(keys_of([page]))))
        self._cache = cache
        self._chooser = chooser
        self._fetches = Fetches(cache, False, chooser.fetched, spans)
        self._page_size = page_size
        self._keys_of = keys_of
        self.boundary = boundary
        self._trailing = trailing
        self._clock = time.perf_counter
        self._seen: dict[str, _Look | None] = {}
        self._unfinished: dict[str, _Look] = {}

    @property
    def looks_ahead(self) -> bool:
        """Whether pages are left to look up."""
        return bool(self._unfinished)

    def is_new(self, rid: str) -> bool:
        """Whether SGLang's own cache must be searched for this request: in the first call since it
        last began to wait, and after loads that it waited for."""
        new = rid not in self._seen
        self._seen.setdefault(rid)
        return new or self.shared.is_unsure(rid)

    def look_up(self, tracked: Tracked, prompt: PromptPages) -> None:
        """Find out what lower tiers have of a request's pages, and begin to read it, in further
        calls of `go_on`. SGLang may schedule requests of one priority before those of another."""
        if self._cache.info.may_fetch and tracked.fetch is None:
            self._end(tracked.id)
            self._seen[tracked.id] = self._unfinished[tracked.id] = _Look(tracked, prompt)
        if prompt.pages and not self._trailing.have_states:
            kind = getattr(tracked.sglang, "priority", None)
            self.shared.waits(tracked.id, prompt.hashes(0, 1, None)[0], kind)

    def go_on(self) -> None:
        """Look up further pages, the oldest request first, for as long as a step may take."""
        end = self._clock() + _SECONDS
        while self._unfinished:
            rid, look = next(iter(self._unfinished.items()))
            goes_on = False
            # An error of SGLang's hashes loses no fetch of any other request.
            with self.boundary.guard(
                "looking ahead", "lower tiers read no more for the request", loses=bool(look.keys)
            ):
                goes_on = self._fetch(look) if look.keys else self._hash(look)
            if not goes_on:
                del self._unfinished[rid]
            if self._clock() >= end:
                return

    def held(self, rids: Sequence[str], ended_batch: int) -> list[bool]:
        """Which requests SGLang must not schedule yet: a lower tier is expected to give blocks of
        them sooner than computing would, it is not known yet whether one has any, or another
        request loads their first page.

        Args:
            rids: all waiting requests, in the order of SGLang's queue. Fetches for any other
                request end: those requests have left the queue.
            ended_batch: the last batch whose loads have ended.
        """
        self.shared.end_loads(ended_batch)
        for rid in self._seen.keys() - set(rids):
            self._end(rid)
            del self._seen[rid]  # not before: an error would lose the fetch
        # Those that no step has had time for yet, too. `hooks` looks at them in this order.
        looking = {rid for rid in rids[:WINDOW] if rid not in self._seen or rid in self._unfinished}
        waits = [rid in looking or self._is_awaited(rid) for rid in rids]
        return self.shared.held(rids, waits)

    def fetched(self, tracked: Tracked, keys: Sequence[bytes]) -> Counter[Medium]:
        """How many of these blocks each lower tier has fetched for a request since it last began to
        wait."""
        return fetched_blocks(self._fetches.media_of(tracked), keys)

    def leave(self, tracked: Tracked) -> None:
        """SGLang computes the request, or it has ended: its fetches end."""
        look = self._seen.get(tracked.id)
        if look is not None and look.tracked is tracked:
            self._end(tracked.id)

    def forget_keys(self) -> None:
        """From now on, pages have other keys. Fetches by earlier ones end with their requests, and
        none begins. Raises nothing."""
        self._unfinished.clear()
        self.shared.clear()
        for look in filter(None, self._seen.values()):
            look.seen.clear()

    def end_fetches(self) -> None:
        """End the fetches of all requests. Idempotent."""
        for rid in self._seen:
            self._end(rid)

    def _end(self, rid: str) -> None:
        """End the fetches of a request, and release their blocks."""
        self._unfinished.pop(rid, None)
        look = self._seen.get(rid)
        if look is not None:
            self._fetches.end(look.tracked)
            if look.trailing is not None:
                self._fetches.end(look.trailing)
            self._seen[rid] = None

    def _hash(self, look: _Look) -> bool:
        """Hash the next portion of pages. Returns whether another one may be of use."""
        start, stop = look.hashed, min(look.hashed + _HASHED_PAGES, look.prompt.pages)
        if start == stop:
            return False
        hashes = look.prompt.hashes(start, stop, look.before)
        look.hashed, look.before = stop, hashes[-1]
        keys = self._keys_of(hashes)
        if self._trailing:
            look.seen += keys
        # A fetch takes all pages from its first one on, in host memory or not.
        found = 0 if look.tracked.fetch is not None else self._cache.lookup(keys)
        if found:
            look.last = keys[found - 1 : found]
        look.keys = keys[found:]
        return bool(look.keys) or stop < look.prompt.pages

    def _fetch(self, look: _Look) -> bool:
        """Fetch the next portion of hashed pages. Returns whether another one may be of use."""
        part, look.keys = look.keys[:_FETCHED_PAGES], look.keys[_FETCHED_PAGES:]
        if look.tracked.fetch is not None:
            goes_on = self._fetches.extend(look.tracked, part)
        else:
            # The page before them, so that host memory keeps it at least as long.
            first = look.hashed - len(look.keys) - len(part) - len(look.last)
            fetch = self._fetches.begin(look.tracked, [*look.last, *part], first)
            # If it ends before them, no tier has a block behind it.
            goes_on = fetch is not None and self._cache.fetch_state(fetch.id).stop == len(
                fetch.keys
            )
        return goes_on and bool(look.keys or look.hashed < look.prompt.pages)

    def _is_awaited(self, rid: str) -> bool:
        look = self._seen.get(rid)
        if look is None or (look.seen and look.trailing is None and not self._fetch_trailing(look)):
            return False
        if self._is_worth_waiting(look.tracked, 0):
            return True
        return look.trailing is not None and self._is_worth_waiting(look.trailing, look.end)

    def _is_worth_waiting(self, tracked: TrackedRequest, end: int) -> bool:
        """Whether the request's fetch is expected to end sooner than computing would. `end`: pages
        of the prefix that it ends; 0 for a fetch of the prefix itself."""
        fetch = tracked.fetch
        if fetch is None:
            return False
        state, size = self._cache.fetch_state(fetch.id), self._page_size
        span = Span(fetch.start * size, (end or fetch.start + state.stop) * size)
        return not state.done and self._chooser.is_worth_waiting(fetch.id, span)

    def _fetch_trailing(self, look: _Look) -> bool:
        """Begin to fetch trailing pages, if the end of the prefix is known. Returns False if no
        tier has any that the request could use: then it uses no page of the prefix, either."""
        prefix = look.tracked.fetch
        if prefix is None:
            length = self._cache.lookup(look.seen)
        else:
            state = self._cache.fetch_state(prefix.id)
            if state.queried is not None and not state.done:
                return True
            length = prefix.start + state.stop
        tracked = look.tracked
        look.trailing = TrackedRequest(tracked.request, tracked.options)
        look.end = self._trailing.longest(self._cache, look.seen[:length], OBTAINABLE)
        if length and not look.end:
            self._fetches.end(tracked)
            return False
        self._fetches.begin(look.trailing, self._trailing.keys_of_hit(look.seen[: look.end]), 0)
        return True
