# SPDX-License-Identifier: Apache-2.0
"""A subscriber to the events of a rank's tiers."""

from __future__ import annotations

import time

from sglang_world import PATIENCE_SECONDS, Rank, hashes_of

from flexkv.types.changes import Medium
from flexkv_sglang.events import Page, TierEvent, TierEvents


class Subscriber:
    """What a subscriber of one rank knows: the pages of each medium."""

    def __init__(self, rank: Rank) -> None:
        rank.side.watch()
        assert rank.side.events is not None
        self.rank = rank
        self.events: TierEvents = rank.side.events
        self.known: set[tuple[Medium, int]] = set()
        self.pages: dict[tuple[Medium, int], Page] = {}

    def offload(self, text: str, count: int, *, told: bool = True) -> None:
        """Store pages as SGLang has it done."""
        if told:
            self.learn(text, count)
        assert self.rank.store(hashes_of(text, count), range(1, count + 1))

    def learn(self, text: str, count: int) -> None:
        self.events.learn(pages_of(text, count), (), cleared=False)

    def leave(self, text: str, count: int) -> None:
        """SGLang's device has these pages no more."""
        self.events.learn((), numbers_of(text, count), cleared=False)

    def flush(self) -> None:
        self.known.clear()
        self.events.learn((), (), cleared=True)

    def listen(self) -> list[TierEvent]:
        told = self.events.take()
        self.events.confirm(told)
        for each in told:
            what = each.medium, each.page.number
            assert (what in self.known) != each.stored, "told twice"
            self.known ^= {what}
            self.pages[what] = each.page
        return told

    def wait_for(self, medium: Medium, numbers: set[int]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while {number for each, number in self.known if each is medium} != numbers:
            assert time.monotonic() < deadline, self.known
            self.rank.side.ended_offloads()
            self.listen()


def pages_of(text: str, count: int) -> list[Page]:
    numbers = numbers_of(text, count)
    return [Page(number, numbers[i - 1] if i else None, [i]) for i, number in enumerate(numbers)]


def numbers_of(text: str, count: int) -> list[int]:
    """SGLang's of pages: the first 64 bits of their hashes."""
    return [
        int.from_bytes(bytes.fromhex(each)[:8], "big", signed=True)
        for each in hashes_of(text, count)
    ]
