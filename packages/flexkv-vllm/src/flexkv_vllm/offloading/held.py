# SPDX-License-Identifier: Apache-2.0
"""Stores whose blocks are not known to be computed yet.

See `flexkv.engine.scheduler.storing.Stores`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from flexkv.client import CacheClient, Transfer, TransferEnd
from flexkv.engine.boundary import ErrorBoundary, answers
from flexkv.engine.scheduler.storing import UNREPORTED_STEPS, first_of
from flexkv_vllm.compat.patches import blocks_of_requests, drop_from_prefix_cache


class _Held(NamedTuple):
    """A held store: the ids of its request and transfer, and the number of its step."""

    request_id: str
    transfer_id: int
    step: int


class HeldStores:
    """The held stores of one engine. vLLM copies a step's blocks with the next step, and reports
    the end of a store behind the results of the step that computed its blocks.

    Args:
        cache: of the engine.
        boundary: catches errors.

    Attributes:
        lost: whether wrong blocks may be found, because they could not be discarded.
    """

    def __init__(self, cache: CacheClient, boundary: ErrorBoundary) -> None:
        self.lost = False
        self._cache = cache
        self._boundary = boundary
        self._held: dict[bytes, _Held] = {}
        self._step = 0

    def __len__(self) -> int:
        """The number of held stores."""
        return len(self._held)

    def hold(self, request_id: str, transfer: Transfer) -> None:
        """Note a store of a request, which the cache holds."""
        key = min(transfer.keys)
        self._held[key] = _Held(request_id, transfer.id, self._step)

    def release(self, keys: Collection[bytes]) -> None:
        """vLLM has reported the end of the store of these blocks."""
        key = min(keys, default=b"")
        held = self._held.get(key)
        if held is not None:
            self._cache.end_transfer(held.transfer_id, TransferEnd.CONFIRM)
            del self._held[key]

    def release_all(self) -> None:
        """The cache was cleared or paused: vLLM reports no more ends, and nothing is published."""
        for held in self._held.values():
            self._cache.end_transfer(held.transfer_id, TransferEnd.CONFIRM)
        self._held.clear()

    def discard_all(self) -> None:
        """After an error, which may have lost vLLM's report of an end: no held store is found."""
        for held in self._held.values():
            self._cache.end_transfer(held.transfer_id, TransferEnd.DISCARD)
        self.release_all()

    def step_is_complete(self) -> None:
        """vLLM has scheduled a step."""
        self._step += 1
        while self._held:
            key, oldest = next(iter(self._held.items()))
            if oldest.step + UNREPORTED_STEPS >= self._step:
                return
            self.release([key])

    @answers(lambda self, *_: self._lose(), "FlexKV finds nothing until the engine is restarted")
    def discard(self, invalid: set[int], side: object) -> None:
        """Loads of a step that has ended, another connector's too, did not fill vLLM's blocks
        `invalid`: discard what was stored of requests that have one of them, and take the blocks
        out of vLLM's prefix cache, with those behind them.

        Args:
            invalid: the blocks.
            side: the scheduler side of vLLM's connector.
        """
        wrong, affected = set(invalid), set()
        requests = blocks_of_requests(side)
        for request_id, tables in ({} if requests is None else requests).items():
            for table in tables:
                behind = table[first_of(invalid, table) :]
                wrong.update(behind)
                if behind:
                    affected.add(request_id)
        for held in self._held.values():
            if requests is None or held.request_id in affected:
                self._cache.end_transfer(held.transfer_id, TransferEnd.DISCARD)
        drop_from_prefix_cache(side, wrong)

    def _lose(self) -> None:
        self.lost = True
