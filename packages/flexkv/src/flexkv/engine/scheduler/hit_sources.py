# SPDX-License-Identifier: Apache-2.0
"""Finds the tiers that gave the blocks of a hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flexkv.client import FetchState
from flexkv.types.changes import Medium

_NOT_FETCHED = (None, Medium.HOST)


def note_media(media: dict[bytes, Medium], keys: Sequence[bytes], state: FetchState) -> None:
    """Add to `media` the medium of each block that a fetch awaits or awaited, or could bring if the
    arena had room.

    Args:
        media: media of blocks by key; changed.
        keys: keys of the fetch.
        state: state of the fetch.
    """
    for start, stop, medium in (*state.awaited, *state.later):
        media.update(dict.fromkeys(keys[start:stop], medium))


def fetched_blocks(media: Mapping[bytes, Medium], keys: Sequence[bytes]) -> Counter[Medium]:
    """Count the blocks of `keys` that each lower tier gave or is expected to give.

    Args:
        media: media of blocks that host memory did not have, by key; see `note_media`.
        keys: keys of blocks.
    """
    counts = Counter(map(media.get, keys))
    return Counter({medium: counts[medium] for medium in counts if medium not in _NOT_FETCHED})


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
