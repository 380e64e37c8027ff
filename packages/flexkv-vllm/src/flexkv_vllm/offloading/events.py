# SPDX-License-Identifier: Apache-2.0
"""The changes of loadable blocks, for the KV events of vLLM's `OffloadingConnector`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx

from flexkv.client import CacheClient
from flexkv.engine.epoch_cache import epoch_of
from flexkv.engine.key_epoch import KeyEpoch
from flexkv.engine.scheduler.groups import Group, Reach
from flexkv_vllm.compat.events import group_traits
from flexkv_vllm.events import BlockEvents
from flexkv_vllm.offloading.requests import GroupBlocks, RequestBlocks
from flexkv_vllm.pool import Pool

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent


@dataclass(frozen=True, slots=True)
class OffloadedNames:
    """See `NamedKeys`. The cache itself has the end of the epoch behind its keys."""

    hash_tokens: int
    epoch: KeyEpoch

    def origin(self, key: bytes) -> tuple[int, bytes]:
        """See `NamedKeys.origin`."""
        name = OffloadKey(key)
        return get_offload_group_idx(name), get_offload_block_hash(name)


class OffloadedBlocks:
    """Reports the loadable blocks, as FlexKV's own connector does. Single-threaded.

    Args:
        cache: the cache of the engine; watched from now on. The first calls of `take` report the
            blocks that its disks hold already.
        hash_tokens: tokens of one of vLLM's block hashes.
        chunk: vLLM's blocks of a FlexKV block.
    """

    def __init__(self, cache: CacheClient, hash_tokens: int, chunk: int) -> None:
        self._cache = cache
        self._chunk = chunk
        self._names = OffloadedNames(hash_tokens, epoch_of(cache))
        self._traits: dict[int, dict[str, Any]] = {}
        # Blocks of adapters are never on disk at the start.
        self._events = BlockEvents(cache, self._names, has_stamps=False, traits=self._traits)

    def bind(self, pool: Any, kv_cache_config: Any) -> None:
        """vLLM's own prefix cache, whose resets are followed, and the configuration of its groups
        are known from now on."""
        self._traits |= group_traits(kv_cache_config)
        self._events.bind_pool(Pool(pool))

    def describe(self, blocks: RequestBlocks, keys: Sequence[bytes]) -> None:
        """Those of the blocks of a request that have a slot in host memory are reported in full."""
        request: Any = blocks.request
        if request is None:
            return
        missing = set(self._cache.missing(keys))
        there = [key for i, key in enumerate(keys) if i not in missing]
        for group, found in blocks.places(there):
            tokens = group.tokens // self._chunk
            kind = Group(group.number, Reach.ALL, 0, tokens, self._chunk)
            own = self._of_request(request, group, found)
            self._events.describe(request, kind, own)

    def _of_request(
        self, request: Any, group: GroupBlocks, found: Sequence[tuple[int, bytes]]
    ) -> Iterator[tuple[int, bytes]]:
        """Without those of a prompt that has changed since."""
        hashes, step = request.block_hashes, group.tokens // self._names.hash_tokens
        for position, key in found:
            at = (position + 1) * step - 1
            if at < len(hashes) and self._names.origin(key) == (group.number, hashes[at]):
                yield position, key

    def cleared(self) -> None:
        """See `BlockEvents.cleared`."""
        self._events.cleared()

    @property
    def pending(self) -> bool:
        """See `BlockEvents.pending`."""
        return self._events.pending

    def take(self) -> list[KVCacheEvent]:
        """See `BlockEvents.take`."""
        return self._events.take()
