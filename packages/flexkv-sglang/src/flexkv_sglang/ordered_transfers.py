# SPDX-License-Identifier: Apache-2.0
"""The loads and stores that all ranks know, until each has ended; an error loses none."""

from __future__ import annotations

from collections.abc import Callable

from flexkv.client import CacheClient, Ended, Reset
from flexkv.engine.scheduler.ended import EndedTransfers
from flexkv_sglang.copies import Offload


class OrderedTransfers:
    """The transfers of one engine, on the rank that decides. Single-threaded.

    Args:
        cache: the engine's cache; polled.
        ended: called with each transfer that has ended.

    Attributes:
        offloads: the transfers by their numbers; None for a load. The caller adds those that all
            ranks have agreed on, and removes those that it cancels.
    """

    def __init__(self, cache: CacheClient, ended: Callable[[Ended], None]) -> None:
        self._cache = cache
        self._ended = EndedTransfers(cache)
        self._note_end = ended
        self.offloads: dict[int, Offload | None] = {}
        self._copied: dict[int, Offload] = {}
        self._lost_some = False

    def lose(self) -> None:
        """After an error that may have lost a lease or a transfer: the next `poll` cancels the
        transfers that the ranks do not know, and ends those whose end was not seen."""
        self._cache.reset(Reset.RECOVER)
        self._lost_some = True

    def poll(self) -> bool:
        """Note the transfers that have ended. Returns whether anything was under way."""
        if not self._ended.busy and not self._copied:
            return False
        if self._lost_some:
            self._ended.end_lost(self.offloads.keys(), self.offloads.keys())
            self._lost_some = False
        for ended in self._ended.take():
            offload = self.offloads.get(ended.id)
            if offload is not None:
                offload.stored &= ended.done
                self._copied[ended.id] = offload
            self.offloads.pop(ended.id, None)
            self._note_end(ended)
        if self._copied:
            self._end_published()
        return True

    def _end_published(self) -> None:
        """End the offloads that the cache has published, or of which it may never know."""
        status = self._cache.status
        is_silent, publishing = status.is_silent, status.publishing
        for number, offload in list(self._copied.items()):
            if is_silent or number not in publishing:
                offload.stored &= not is_silent
                offload.transfer_id = 0
                del self._copied[number]
