# SPDX-License-Identifier: Apache-2.0
"""What a cache and its lower tiers count, as attributes of the objects that count."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from operator import attrgetter


class ResetCause(enum.StrEnum):
    """Why an engine resets the cache. The values are labels of metrics."""

    REQUEST = "request"
    """A user asked for it."""
    WEIGHTS = "weights"
    """The engine got other weights."""
    DOUBT = "doubt"
    """The engine paused, and its weights may have changed without a sign."""
    PAUSE = "pause"
    """The engine paused and has the weights of before. No block is dropped."""


@dataclass(slots=True)
class TierCounters:
    """Counters of one lower tier."""

    fetched_blocks: int = 0
    """Blocks read from the tier and verified."""
    failed_fetches: int = 0
    """Blocks that the tier had promised and did not deliver: damaged, or an I/O error."""
    damaged_fetches: int = 0
    """Failed fetches of damaged blocks."""
    stalled_fetches: int = 0
    """Waits for the tier that FlexKV gave up."""
    late_questions: int = 0
    """Questions that the tier did not answer by the deadline."""
    demoted_blocks: int = 0
    """Blocks written to the tier, or found there."""
    dropped_demotions: int = 0
    """Blocks not written to the tier: its queue was full, its write budget was spent, or the tier
    lacks the block before them."""
    failed_demotions: int = 0
    """Blocks whose write to the tier failed."""


@dataclass(slots=True)
class Counters(TierCounters):
    """Counters of a cache, with the sums over all lower tiers.

    Blocks are FlexKV blocks; bytes are those of all ranks together.
    """

    loads: int = 0
    """Loads ordered."""
    loaded_blocks: int = 0
    """Blocks of loads that ended on all ranks."""
    loaded_bytes: int = 0
    """Bytes of these blocks."""
    failed_loads: int = 0
    """Loads that a rank reported as failed; their blocks were dropped."""
    stores: int = 0
    """Stores ordered."""
    stored_blocks: int = 0
    """Blocks that became ready."""
    stored_bytes: int = 0
    """Bytes of these blocks."""
    failed_stores: int = 0
    """Stores that a rank reported as failed. Lookups never find their blocks."""
    refused_blocks: int = 0
    """Blocks that were not stored because no slot or no place on the board could be had."""
    evicted_blocks: int = 0
    """Blocks that host memory evicted for others."""
    expired_blocks: int = 0
    """Blocks that left host memory because they were too old."""
    refused_pins: int = 0
    """Blocks that were not pinned or retained because of the limits on both."""
    resets: int = 0
    """Times that all blocks were dropped."""
    request_resets: int = 0
    """Resets that a user asked for."""
    weight_resets: int = 0
    """Resets because the engine got other weights."""
    doubt_resets: int = 0
    """Resets because the engine paused and its weights may have changed unseen."""
    pauses: int = 0
    """Times that the engine reset its own cache for a pause, and blocks stayed."""

    def count_reset(self, cause: ResetCause) -> None:
        """Count a reset, or a pause that kept all blocks."""
        self.resets += cause is not ResetCause.PAUSE
        self.request_resets += cause is ResetCause.REQUEST
        self.weight_resets += cause is ResetCause.WEIGHTS
        self.doubt_resets += cause is ResetCause.DOUBT
        self.pauses += cause is ResetCause.PAUSE

    def add_up(self, tiers: Iterable[TierCounters]) -> None:
        """Set the counters of lower tiers to the sums over `tiers`, which are all lower tiers."""
        counted = list(tiers)
        if not counted:
            return
        for each in fields(TierCounters):
            setattr(self, each.name, sum(map(attrgetter(each.name), counted)))

    def as_dict(self) -> dict[str, int]:
        """All counters by name, those of lower tiers too."""
        return asdict(self)
