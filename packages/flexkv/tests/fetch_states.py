# SPDX-License-Identifier: Apache-2.0
"""States of fetches that no cache has."""

from __future__ import annotations

from flexkv.client import FetchId, FetchState


class FetchStates(dict[FetchId, FetchState]):
    """The state of each fetch; `__getitem__` stands for `CacheClient.fetch_state`."""

    def begin(self, state: FetchState) -> FetchId:
        """A new fetch in this state."""
        fetch = FetchId(len(self))
        self[fetch] = state
        return fetch
