# SPDX-License-Identifier: Apache-2.0
"""Which tiers a hit came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flexkv.changes import Medium
from flexkv.transfer.fetch import Fetch

Awaited = dict[bytes, Fetch]
"""The fetch that was to bring each block that host memory did not have, by the block's key."""


def fetched_blocks(awaited: Mapping[bytes, Fetch], keys: Sequence[bytes]) -> Counter[Medium]:
    """How many of the blocks of `keys` came from each lower tier, or are on their way."""
    if not awaited:
        return Counter()
    media = (awaited[key].medium_of(key) for key in keys if key in awaited)
    return Counter(medium for medium in media if medium is not Medium.HOST)


def slowest(fetched: Mapping[Medium, int]) -> Medium:
    """The slowest tier that gave a block."""
    return max(fetched, key=list(Medium).index)


def limited(fetched: Mapping[Medium, int], tokens: int) -> dict[Medium, int]:
    """At most `tokens` of the tokens that came from lower tiers; the slowest keep theirs."""
    kept: dict[Medium, int] = {}
    for medium in reversed(Medium):
        count = min(fetched.get(medium, 0), tokens)
        if count > 0:
            kept[medium] = count
            tokens -= count
    return kept
