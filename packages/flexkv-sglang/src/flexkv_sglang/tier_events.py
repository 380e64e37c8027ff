# SPDX-License-Identifier: Apache-2.0
"""Events for the pages in FlexKV's tiers: those that SGLang's subscribers do not know of yet.

Tiers know pages by their hashes alone. SGLang's own events give the tokens: they report each page
that SGLang computes or FlexKV loads, also pages that an earlier process has stored. This module
imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flexkv.client import CacheClient
from flexkv.types.changes import Changes, Medium

_HASH_BYTES = 32
_NUMBER_BYTES = 8
"""Leading bytes of a hash that SGLang's events carry, as a signed number."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page as SGLang's events describe it.

    Attributes:
        number: the first 8 bytes of its hash, as a signed number.
        parent: the number of the page before it; None for the first page of a prompt.
        tokens: its tokens.
    """

    number: int
    parent: int | None
    tokens: list[Any]


@dataclass(frozen=True, slots=True)
class Told:
    """An event: a tier has a page from now on (`stored`), or has it no longer."""

    medium: Medium
    page: Page
    stored: bool


class TierEvents:
    """The events of one engine. Single-threaded.

    Args:
        cache: the engine's cache; borrowed. Its changes are recorded from now on.
    """

    def __init__(self, cache: CacheClient) -> None:
        self._cache = cache
        self._epoch = b""
        self._pages: dict[int, tuple[int, Page]] = {}
        self._learned = 0
        # By number, the page of each block that a tier has, as its event described it; None as long
        # as there is no event, because SGLang has not described the page.
        self._reported: dict[Medium, dict[int, Page | None]] = {medium: {} for medium in Medium}
        self._described: dict[int, None] = {}  # pages of which tiers may lack an event
        self._removed: list[Told] = []
        self._left: set[int] = set()
        self._unsure: set[int] = set()
        cache.watch()

    def learn(self, stored: Iterable[Page], removed: Iterable[int], cleared: bool) -> None:
        """Take in SGLang's events about pages on the device.

        Args:
            stored: new pages, each after its parent.
            removed: numbers of pages that have left the device.
            cleared: whether SGLang first told its subscribers that no tier has any page.
        """
        if cleared:
            self._removed.clear()
            for reported in self._reported.values():
                known = [number for number, page in reported.items() if page is not None]
                reported.update(dict.fromkeys(known))
                self._described |= dict.fromkeys(known)
            self._leave(self._pages)
        for page in stored:
            self._left.discard(page.number)
            if page.number not in self._pages:
                self._learned += 1
                self._pages[page.number] = self._learned, page
                self._described[page.number] = None
        self._leave(removed)

    def take(self) -> list[Told]:
        """The events since the last call: removals first, then stored pages in the order of
        SGLang's own events."""
        removed, self._removed = self._removed, []
        new: dict[tuple[Medium, int], None] = {}
        for changes in self._cache.drain_changes():
            self._apply(changes, new, removed)
        described, self._described = self._described, {}
        for medium, reported in self._reported.items():
            new |= {(medium, number): None for number in described if number in reported}
        stored: list[tuple[int, Told]] = []
        for medium, number in new:
            reported = self._reported[medium]
            if reported[number] is None and number in self._pages:
                order, page = self._pages[number]
                reported[number] = page
                stored.append((order, Told(medium, page, True)))
        self._forget()
        stored.sort(key=lambda each: each[0])
        return removed + [each for _, each in stored]

    def forget_all(self, epoch: bytes) -> None:
        """Forget all pages in tiers: no lookup finds them again. The next `take` reports their
        removal.

        Args:
            epoch: the end of all keys from now on.
        """
        self._epoch = epoch
        for medium, reported in self._reported.items():
            self._removed += [Told(medium, p, False) for p in reported.values() if p is not None]
            reported.clear()
        self._unsure |= self._left

    def _apply(
        self, changes: Changes, new: dict[tuple[Medium, int], None], removed: list[Told]
    ) -> None:
        """Follow the changes of a medium; add its new pages to `new`, and events to `removed`."""
        reported = self._reported[changes.medium]
        for number in self._numbers(changes.removed):
            page = reported.pop(number, None)
            if page is not None:
                removed.append(Told(changes.medium, page, False))
            self._unsure.add(number)
        for number in self._numbers(changes.added):
            reported[number] = None
            new[changes.medium, number] = None

    def _numbers(self, keys: Iterable[bytes]) -> Iterator[int]:
        """The numbers of the pages of `keys`, but those of other weights."""
        for key in keys:
            if key[_HASH_BYTES:] == self._epoch:
                yield int.from_bytes(key[:_NUMBER_BYTES], "big", signed=True)

    def _leave(self, numbers: Iterable[int]) -> None:
        self._left.update(numbers)
        self._unsure.update(numbers)

    def _forget(self) -> None:
        """Discard pages that neither SGLang nor a tier has. SGLang keeps a page on the device until
        it is stored."""
        for number in self._unsure & self._left:
            if not any(number in reported for reported in self._reported.values()):
                self._left.discard(number)
                self._pages.pop(number, None)
        self._unsure.clear()
