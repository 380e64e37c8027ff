# SPDX-License-Identifier: Apache-2.0
"""Fetches from lower tiers for requests ahead of their turn, a few pages in each step.

A prompt of 32,768 tokens in pages of one token takes SGLang 4 ms to hash, and a fetch of all its
blocks 150 ms to begin. Decoding would stop meanwhile, for each request of a burst.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexkv.client import CacheClient
from flexkv.engine.boundary import ErrorBoundary
from flexkv_sglang.awaited import AwaitedPrefixes

WINDOW = 64
"""The most waiting requests that are looked up ahead of their turn, so that disks read for them
while SGLang computes others. Larger than a batch of prompts; their fetches keep blocks in host
memory. Not tuned."""

_SECONDS = 0.001
"""Seconds of a step after which no further pages are looked up. With the last portion it takes
less than 2 ms, a tenth of a step that decodes. Not tuned."""

_HASHED_PAGES = 512
"""Pages that are hashed at once: about 0.1 ms. Not tuned."""

_FETCHED_PAGES = 96
"""Pages whose fetch begins at once: about 0.4 ms, in part to wake a disk's thread. With 128, more
than 5 of 100 steps took more than 2 ms."""


class Prompt(Protocol):
    """The pages of a prompt that SGLang's own cache lacks."""

    @property
    def pages(self) -> int:
        """How many there are."""
        ...

    @property
    def tenant(self) -> int:
        """Number of the request's tenant."""
        ...

    def hashes(self, start: int, stop: int, before: str | None) -> Sequence[str]:
        """SGLang's hashes of pages `start` to `stop`. `before` is the hash of the page before them;
        None if `start` is 0."""
        ...


@dataclass(slots=True)
class _Look:
    """A request whose pages are looked up.

    Attributes:
        prompt: its pages.
        hashed: how many pages are hashed.
        before: the hash of the last of them.
        keys: keys of hashed pages whose fetch has not begun.
        last: the key of the page before them.
        seen: keys of all hashed pages, if a hit needs trailing pages.
    """

    prompt: Prompt
    hashed: int
    before: str | None
    keys: Sequence[bytes]
    last: Sequence[bytes]
    seen: list[bytes]


class LookAhead:
    """The requests of one engine whose pages are looked up ahead of their turn. Single-threaded.

    A request ends here with all its pages, or with the first that no tier has.

    Args:
        cache: the engine's cache; borrowed.
        awaited: gets the fetches; borrowed.
        keys_of: returns the keys of blocks for SGLang's hashes.
        boundary: where errors of single requests end.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        cache: CacheClient,
        awaited: AwaitedPrefixes,
        keys_of: Callable[[Sequence[str]], Sequence[bytes]],
        boundary: ErrorBoundary,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cache = cache
        self._awaited = awaited
        self._keys_of = keys_of
        self._boundary = boundary
        self._clock = clock
        self._looks: dict[str, _Look] = {}

    def __bool__(self) -> bool:
        """Whether pages are left to look up."""
        return bool(self._looks)

    def __contains__(self, rid: str) -> bool:
        """Whether pages of this request are left to look up."""
        return rid in self._looks

    def begin(self, rid: str, prompt: Prompt) -> None:
        """Look up a request's pages in this and further calls of `go_on`."""
        self._awaited.end(rid)
        self._looks[rid] = _Look(prompt, 0, None, (), (), [])

    def keep(self, rids: Sequence[str]) -> None:
        """Forget all other requests."""
        for rid in self._looks.keys() - set(rids):
            del self._looks[rid]

    def go_on(self) -> None:
        """Look up further pages, the oldest request first, for as long as a step may take."""
        end = self._clock() + _SECONDS
        while self._looks:
            rid, look = next(iter(self._looks.items()))
            goes_on = False
            # An error of SGLang's hashes loses no fetch of any other request.
            with self._boundary.guard(
                "looking ahead", "lower tiers read no more for the request", loses=bool(look.keys)
            ):
                goes_on = self._look(rid, look)
            if not goes_on:
                del self._looks[rid]
                if look.seen:
                    self._awaited.end_with_trailing(rid, look.seen, look.prompt.tenant)
            if self._clock() >= end:
                return

    def clear(self) -> None:
        """Forget all requests."""
        self._looks.clear()

    def _look(self, rid: str, look: _Look) -> bool:
        """Take the next portion of pages. Returns whether another one may be of use."""
        if not look.keys:
            return self._hash(rid, look)
        part, look.keys = look.keys[:_FETCHED_PAGES], look.keys[_FETCHED_PAGES:]
        if rid in self._awaited:
            goes_on = self._awaited.extend(rid, part)
        else:
            # The page before them, so that host memory keeps it at least as long.
            first = look.hashed - len(look.keys) - len(part) - len(look.last)
            tenant = look.prompt.tenant
            goes_on = self._awaited.begin(rid, [*look.last, *part], first, tenant)
        return goes_on and bool(look.keys or look.hashed < look.prompt.pages)

    def _hash(self, rid: str, look: _Look) -> bool:
        start, stop = look.hashed, min(look.hashed + _HASHED_PAGES, look.prompt.pages)
        if start == stop:
            return False
        hashes = look.prompt.hashes(start, stop, look.before)
        look.hashed, look.before = stop, hashes[-1]
        keys = self._keys_of(hashes)
        if self._awaited.trailing:
            look.seen += keys
        # A fetch takes all pages from its first one on, in host memory or not.
        found = 0 if rid in self._awaited else self._cache.lookup(keys)
        if found:
            look.last = keys[found - 1 : found]
        look.keys = keys[found:]
        return bool(look.keys) or stop < look.prompt.pages
