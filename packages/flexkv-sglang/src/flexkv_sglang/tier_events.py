# SPDX-License-Identifier: Apache-2.0
"""Events for the pages in FlexKV's tiers: those that SGLang's subscribers do not know of yet.

Tiers know pages by their hashes alone. SGLang's own events give the tokens: they report each page
that SGLang computes or FlexKV loads, also pages that an earlier process has stored. This module
imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flexkv import KVCache
from flexkv.types.changes import Change, Medium

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

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._epoch = b""
        self._pages: dict[int, tuple[int, Page]] = {}
        self._learned = 0
        self._present: dict[Medium, set[int]] = {medium: set() for medium in Medium}
        self._told: dict[Medium, dict[int, Page]] = {medium: {} for medium in Medium}
        self._changed: dict[tuple[Medium, int], None] = {}
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
            for medium, told in self._told.items():
                self._changed |= dict.fromkeys((medium, number) for number in told)
                told.clear()
            self._leave(self._pages)
        for page in stored:
            self._left.discard(page.number)
            if page.number not in self._pages:
                self._learned += 1
                self._pages[page.number] = self._learned, page
                self._changed |= dict.fromkeys((medium, page.number) for medium in Medium)
        self._leave(removed)

    def take(self) -> list[Told]:
        """The events since the last call: removals first, then stored pages in the order of
        SGLang's own events."""
        for change in self._cache.drain_changes():
            self._note(change)
        changed, self._changed = self._changed, {}
        removed: list[Told] = []
        stored: list[tuple[int, Told]] = []
        for medium, number in changed:
            there, told = number in self._present[medium], self._told[medium]
            known = self._pages.get(number)
            if not there and number in told:
                removed.append(Told(medium, told.pop(number), False))
            elif there and number not in told and known is not None:
                order, page = known
                told[number] = page
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
        for medium, told in self._told.items():
            self._changed |= dict.fromkeys((medium, number) for number in told)
            self._present[medium].clear()
        self._unsure |= self._left

    def _note(self, change: Change) -> None:
        number = self._number(change.key)
        if number is None:
            return
        present = self._present[change.medium]
        self._changed[change.medium, number] = None
        if not change.loadable:
            present.discard(number)
            self._unsure.add(number)
            return
        present.add(number)

    def _number(self, key: bytes) -> int | None:
        """The number of the page of `key`; None if the page belongs to other weights."""
        if key[_HASH_BYTES:] != self._epoch:
            return None
        return int.from_bytes(key[:_NUMBER_BYTES], "big", signed=True)

    def _leave(self, numbers: Iterable[int]) -> None:
        self._left.update(numbers)
        self._unsure.update(numbers)

    def _forget(self) -> None:
        """Discard pages that neither SGLang nor a tier has. SGLang keeps a page on the device until
        it is stored."""
        for number in self._unsure & self._left:
            if not any(number in present for present in self._present.values()):
                self._left.discard(number)
                self._pages.pop(number, None)
        self._unsure.clear()
