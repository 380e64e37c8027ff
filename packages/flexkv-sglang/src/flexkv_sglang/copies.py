# SPDX-License-Identifier: Apache-2.0
"""Loads and stores that SGLang has ordered and that are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from flexkv.client import CacheClient, Ended, Reset, Transfer
from flexkv.engine.orders import CopyOrder
from flexkv.engine.scheduler.ended import EndedTransfers
from flexkv.types.packed_keys import PackedKeys
from flexkv.types.tenants import NO_TENANT

Made: TypeAlias = tuple[Transfer, Sequence[int]] | None
"""A transfer of rank 0's, and numbers that the other ranks get with it; None if there is none."""

Behind: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes a context in which copies follow the work that SGLang has queued on the device."""


@dataclass(slots=True)
class QueuedLoad:
    """A load that begins with the next batch.

    Attributes:
        fails: whether this rank does not know its pages, after an error that the first stage of a
            pipeline has not seen.
        fetched_tokens: tokens of it that lower tiers gave; 0 on all ranks but the first.
    """

    order: CopyOrder
    fails: bool
    fetched_tokens: int = 0


class Origin(NamedTuple):
    """Where pages to store come from: the hash of the page before them, None if it is unknown, and
    the number of the tenant for whom they count."""

    before: str | None = None
    tenant: int = NO_TENANT


@dataclass(slots=True)
class Offload:
    """A store that SGLang has ordered. SGLang asks for the ends of stores in its calls' order.

    Attributes:
        transfer_id: id of the store under way; 0 once it is published or has failed, if nothing is
            copied, and on all ranks but the first.
        stored: whether the cache has all pages of the store, if no store is under way or it
            succeeds.
        tenant: number of the tenant for whom the pages count.
    """

    transfer_id: int = 0
    stored: bool = False
    tenant: int = NO_TENANT

    def reserve(
        self,
        cache: CacheClient,
        before: PackedKeys,
        keys: PackedKeys,
        trailing: Sequence[bytes],
    ) -> Made:
        """Begin the store of blocks of a prefix. If host memory has the block `before` them, which
        is empty if it is unknown, it keeps that block at least as long as them. Each of the blocks
        `trailing` may be evicted without the others. Returns the transfer with the places of the
        copied pages, and behind these their slots; None if no block got a slot."""
        blocks: Sequence[bytes] = [*keys, *trailing] if trailing else keys
        missing = cache.missing(blocks)
        if not missing:
            self.stored = True
            return None
        if cache.missing(before):
            before = before[:0]
        first = len(before)
        chain = [*before, *blocks] if trailing else before + keys
        starts = [*range(1 - first), *range(first + len(keys), len(chain))]
        transfer = cache.store(
            chain,
            [first + place for place in missing],
            prefix_starts=starts,
            tenants=[self.tenant] * len(chain) if cache.info.takes_tenants else None,
        )
        if transfer is None:
            return None
        self.transfer_id = transfer.id
        self.stored = len(transfer.slots) == len(missing)
        if not self.stored:
            place_of = {blocks[place]: place for place in missing}
            missing = [place_of[key] for key in transfer.keys]
        return transfer, [*missing, *transfer.slots]


class OrderedTransfers:
    """The transfers of one engine, on the rank that decides. Single-threaded. `offloads`: the
    transfers by their numbers; None for a load. The caller adds those that all ranks have agreed
    on, and removes those that it cancels. `ended` is called with each that has ended."""

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


class LayerCounter:
    """SGLang's protocol of a counter of loaded layers. `wait` is called with a layer's number from
    0, and returns once the layer's pages are loaded. `consumer_index` is the number of the batch
    that computes; -1 if the batch has no loads."""

    def __init__(self, num_layers: int, wait: Callable[[int], None]) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._wait = wait

    def set_consumer(self, index: int) -> None:
        """Set the batch of the next forward pass; -1 for a batch without loads."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Wait until the pages of layer `threshold` are loaded."""
        if self.consumer_index >= 0:
            self._wait(threshold)
