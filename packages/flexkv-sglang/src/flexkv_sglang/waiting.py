# SPDX-License-Identifier: Apache-2.0
"""The requests in SGLang's queue: which of them SGLang must not schedule yet."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from flexkv.client import CacheClient, FetchState
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadChooser
from flexkv_sglang.awaited import AwaitedPrefixes
from flexkv_sglang.look_ahead import WINDOW, LookAhead, Prompt
from flexkv_sglang.shared_prefixes import SharedPrefixes
from flexkv_sglang.trailing import NONE_TRAILING, TrailingPages


class WaitingRequests:
    """The waiting requests of one engine, on the rank that decides. Single-threaded.

    Args:
        cache: the engine's cache; borrowed.
        chooser: decides which fetches are worth waiting for; borrowed.
        page_size: tokens of a page.
        keys_of: returns the keys of pages for SGLang's hashes.
        boundary: where errors of single requests end.
        trailing: the pages of which a hit needs the last.
        priority_of, fetched: `priority_of` and `ended` of `AwaitedPrefixes`.

    Attributes:
        awaited: the fetches for the requests.
        ahead: the requests whose pages are looked up in lower tiers.
        shared: the requests whose first missing page another request loads.
    """

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        page_size: int,
        keys_of: Callable[[Sequence[str]], Sequence[bytes]],
        boundary: ErrorBoundary,
        *,
        trailing: TrailingPages = NONE_TRAILING,
        priority_of: Callable[[str], int] = lambda rid: 0,
        fetched: Callable[[str, FetchState], None] = lambda rid, state: None,
    ) -> None:
        self.awaited = AwaitedPrefixes(
            cache, chooser, page_size, trailing, priority_of=priority_of, ended=fetched
        )
        self.ahead = LookAhead(cache, self.awaited, keys_of, boundary)
        self._shares = not trailing.have_states
        self.shared = SharedPrefixes(lambda page: bool(cache.lookup(keys_of([page]))))
        self._may_fetch = cache.info.may_fetch
        self._seen: set[str] = set()

    def is_new(self, rid: str) -> bool:
        """Whether this is the first call for the request since it last began to wait."""
        new = rid not in self._seen
        self._seen.add(rid)
        return new

    def look_up(self, rid: str, prompt: Prompt, kind: Hashable) -> None:
        """Find out what a request lacks, and what lower tiers have of it; see `LookAhead` and
        `SharedPrefixes.waits`."""
        if self._may_fetch and rid not in self.awaited:
            self.ahead.begin(rid, prompt)
        if prompt.pages and self._shares:
            self.shared.waits(rid, prompt.hashes(0, 1, None)[0], kind)

    def held(self, rids: Sequence[str]) -> list[bool]:
        """Which requests SGLang must not schedule yet.

        Args:
            rids: all waiting requests, in the order of SGLang's queue. Fetches for any other
                request end.
        """
        self._seen.intersection_update(rids)
        self.ahead.keep(rids)
        # Those that no step has had time for yet, too. `hooks` looks at them in this order.
        looking = {rid for rid in rids[:WINDOW] if rid not in self._seen or rid in self.ahead}
        waits = self.awaited.held(rids)
        waits = [rid in looking or each for rid, each in zip(rids, waits, strict=True)]
        return self.shared.held(rids, waits)

    def forget_keys(self) -> None:
        """From now on, pages have other keys."""
        self.ahead.clear()
        self.shared.clear()
