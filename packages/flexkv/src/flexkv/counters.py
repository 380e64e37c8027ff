# SPDX-License-Identifier: Apache-2.0
"""What a cache counts. Plain integers that only grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class TierCounters:
    """Of one lower tier."""

    fetched_blocks: int = 0
    """Blocks that came back from it, verified."""
    failed_fetches: int = 0
    """Blocks that it had promised and could not give: damaged, or an I/O error."""
    damaged_fetches: int = 0
    """Those of them that were damaged."""
    stalled_fetches: int = 0
    """Waits for it that were given up."""
    late_questions: int = 0
    """Questions that it did not answer by its deadline."""
    demoted_blocks: int = 0
    """Blocks written to it, or found there."""
    dropped_demotions: int = 0
    """Blocks not written to it: its queue was full, its write budget spent, or the block before
    them is not there."""
    failed_demotions: int = 0


@dataclass(slots=True)
class Counters(TierCounters):
    """Blocks are FlexKV blocks; bytes are those of all ranks together. What lower tiers count is
    the sum over all of them."""

    loads: int = 0
    """Loads ordered."""
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    failed_loads: int = 0
    """Loads that a rank reported as failed; their blocks were dropped."""
    stores: int = 0
    """Stores ordered."""
    stored_blocks: int = 0
    """Blocks that became ready."""
    stored_bytes: int = 0
    failed_stores: int = 0
    """Stores that a rank reported as failed; nothing of them is ever found."""
    refused_blocks: int = 0
    """Blocks that were not stored because no slot or no place on the board could be had."""
    evicted_blocks: int = 0
    refused_pins: int = 0
    """Blocks that were not pinned because too much is."""
    resets: int = 0

    def add_up(self, tiers: Iterable[TierCounters]) -> None:
        """Take over what each of all lower tiers counts."""
        counted = list(tiers)
        for each in fields(TierCounters):
            setattr(self, each.name, sum(getattr(tier, each.name) for tier in counted))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
