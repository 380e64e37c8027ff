# SPDX-License-Identifier: Apache-2.0
"""The end of several tiers, of which one fails."""

from __future__ import annotations

import pytest
from memory_tier import MemoryTier

from flexkv.eviction import LRUPolicy
from flexkv.figures.meter import Meter
from flexkv.index.block_index import block_index
from flexkv.tiers.base import AttachedTier
from flexkv.transfer.stack import TierStack
from flexkv.types.changes import Medium


class EndingTier(MemoryTier):
    """A tier whose calls at the end fail, or are counted."""

    def __init__(self, medium: Medium, *, fails: bool) -> None:
        super().__init__(medium)
        self.ended: list[str] = []
        self._fails = fails

    def begin_close(self, flush_seconds: float) -> None:
        self._end("begin_close")

    def close(self, flush_seconds: float = 0.0) -> bool:
        self._end("close")
        return True

    def _end(self, what: str) -> None:
        self.ended.append(what)
        if self._fails:
            raise RuntimeError(f"{what} has failed")


def test_a_tier_that_fails_at_the_end_keeps_no_other_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiers = [EndingTier(Medium.DISK, fails=True), EndingTier(Medium.OBJECTS, fails=False)]
    below = TierStack(
        block_index(4, LRUPolicy()),
        lambda slot: memoryview(bytearray(8)),
        [AttachedTier(tier) for tier in tiers],
        Meter(),
    )
    assert not below.close(0.0)  # the first may still use the arena
    assert [tier.ended for tier in tiers] == [["begin_close", "close"]] * 2
    assert [each.getMessage() for each in caplog.records] == [
        f"error in the disk tier while it closes: RuntimeError('{what} has failed')"
        for what in ("begin_close", "close")
    ]
