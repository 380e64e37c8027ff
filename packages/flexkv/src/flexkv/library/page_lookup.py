# SPDX-License-Identifier: Apache-2.0
"""Finds which blocks of a prefix a cache has. Shared stores have to be asked, which takes time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flexkv.client import FetchId
from flexkv.library.page_copies import Copier
from flexkv.types.presence import Presence

_ASK_PAUSE_SECONDS = 0.0005
"""Pause between two polls while a lookup waits for shared stores, which answer in milliseconds. Not
tuned."""


def find_pages(copier: Copier, keys: Sequence[bytes]) -> list[bool]:
    """For each block whether the cache has it. Behind the first that no tier has, shared stores are
    not asked. Waits for each of them up to its deadline.

    Args:
        copier: the copier of the cache.
        keys: keys of the prefix from some block on, first block first.

    Raises:
        FlexKVError: the cache is closed.
    """
    while True:
        with copier.use() as cache:
            copier.advance()
            is_shared = cache.info.is_shared
            asks = cache.info.must_query and not is_shared and cache.query(keys)
            places = cache.presence(keys)
            found = [place in {Presence.HOST, Presence.BELOW} for place in places]
            count = leading(found)
            is_known = count == len(keys) or places[count] is Presence.ABSENT
            fetch = None
            if not is_known and is_shared:
                fetch = cache.fetch(keys[count:], queued=True)  # the service asks its stores
        if fetch is not None:
            more = _count_coming(copier, fetch)
            found[count : count + more] = [True] * more
        if fetch is not None or is_known or not asks:
            return found
        time.sleep(_ASK_PAUSE_SECONDS)


def leading(found: Sequence[bool]) -> int:
    """The number of blocks before the first that is missing."""
    return found.index(False) if False in found else len(found)


def _count_coming(copier: Copier, fetch: FetchId) -> int:
    """How many blocks a fetch can bring. Ends it."""
    try:
        while True:
            with copier.use() as cache:
                copier.advance()
                state = cache.fetch_state(fetch)
            if state.queried is None or state.done:
                return state.stop
            time.sleep(_ASK_PAUSE_SECONDS)
    finally:
        with copier.use() as cache:
            cache.end_fetch(fetch)
