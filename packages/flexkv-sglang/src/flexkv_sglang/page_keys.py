# SPDX-License-Identifier: Apache-2.0
"""The keys of SGLang's pages."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.engine.key_epoch import KeyEpoch
from flexkv.types.packed_keys import PackedKeys
from flexkv_kernels.block_index import pack_keys

_KEPT = 1 << 17
"""The most keys that are kept, about 6 MB: those of some long prompts. Not tuned."""

_LEAST = 64
"""Fewer keys are sooner made than found. Not tuned."""


class PageKeys:
    """Makes the keys of pages, which end with the epoch's end. Single-threaded.

    Attributes:
        epoch: of the keys.
        flushes: how often SGLang has flushed its own cache.
        mixed: whether SGLang's own cache may have pages of earlier weights. Pages that are computed
            behind such pages have the keys of this epoch, and are of no use after a flush.
    """

    def __init__(self) -> None:
        self.epoch = KeyEpoch()
        self.flushes = 0
        self.mixed = False
        self._kept: dict[str, PackedKeys] = {}
        self._kept_keys = 0

    def of(self, hashes: Sequence[str]) -> PackedKeys:
        """The keys of blocks.

        Keys of prompts are kept: SGLang looks a request up in step after step, then loads its pages
        or has them stored. A hash covers all pages before it. So of two parts of prompts whose last
        hashes are equal, one is the end of the other.

        Args:
            hashes: SGLang's hashes in hex of consecutive pages, which cover prefix, tenant and
                adapter.
        """
        count = len(hashes)
        if count < _LEAST:
            return pack_keys(hashes, self.epoch.end)
        known = self._kept.get(hashes[-1])
        if known is not None and len(known) >= count:
            return known[len(known) - count :]
        keys = pack_keys(hashes, self.epoch.end)
        if count <= _KEPT:
            self._forget(hashes[-1])
            self._kept[hashes[-1]] = keys
            self._kept_keys += count
            while self._kept_keys > _KEPT:
                self._forget(next(iter(self._kept)))
        return keys

    def _forget(self, last: str) -> None:
        self._kept_keys -= len(self._kept.pop(last, ()))

    def flushed(self) -> bool:
        """Count a flush of SGLang's own cache. Returns whether `renew` must follow."""
        self.flushes += 1
        return self.mixed

    def renew(self, *, mixed: bool) -> None:
        """Begin another epoch; see `KeyEpoch.renew`. `mixed`: see the attribute."""
        self.epoch.renew()
        self._kept.clear()
        self._kept_keys = 0
        self.mixed = mixed
