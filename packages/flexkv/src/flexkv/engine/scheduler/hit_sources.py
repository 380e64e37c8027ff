# SPDX-License-Identifier: Apache-2.0
"""Finds the tiers that gave the blocks of a hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flexkv.transfer.fetch import Fetch
from flexkv.types.changes import Medium

Awaited = dict[bytes, Fetch]
"""The fetch of each block that host memory did not have, by the key of the block."""


def fetched_blocks(awaited: Mapping[bytes, Fetch], keys: Sequence[bytes]) -> Counter[Medium]:
    """Count the blocks of `keys` that each lower tier gave or is expected to give."""
    if not awaited:
        return Counter()
    media = (awaited[key].medium_of(key) for key in keys if key in awaited)
    return Counter(medium for medium in media if medium is not Medium.HOST)


def slowest(fetched: Mapping[Medium, int]) -> Medium:
    """The slowest tier in `fetched`, which must not be empty."""
    return max(fetched, key=list(Medium).index)


def limited(fetched: Mapping[Medium, int], tokens: int) -> dict[Medium, int]:
    """Limit the tokens that came from lower tiers to `tokens` in all. The slowest tiers keep theirs
    first."""
    kept: dict[Medium, int] = {}
    for medium in reversed(Medium):
        count = min(fetched.get(medium, 0), tokens)
        if count > 0:
            kept[medium] = count
            tokens -= count
    return kept
