# SPDX-License-Identifier: Apache-2.0
"""KV events: reports the blocks that FlexKV can load to vLLM's subscribers.

A FlexKV block holds several of vLLM's blocks, and is loadable as a whole. Events contain vLLM's own
block hashes, since a router looks these up. Each hash of a FlexKV block is reported once for each
medium. FlexKV blocks that begin alike and end differently share their first vLLM blocks: these are
reported with the first FlexKV block that has them, and removed with the last.

Each report compares the emitted events with the present blocks, so no change can be missed.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexkv import KVCache
from flexkv.engine.scheduler.groups import Group
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.types.changes import Change, Medium
from flexkv_vllm.compat.events import (
    MEDIA,
    block_removed,
    block_stored,
    event_extra_keys,
    event_hash,
    group_traits,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_LOCALITY = "LOCAL"


@dataclass(frozen=True, slots=True)
class Description:
    """The fields of a FlexKV block's event, apart from its medium. Kept while host memory has it.

    Attributes:
        position: position of the block in its prefix, in FlexKV blocks.
        group: vLLM's number of its KV cache group.
        block_size: tokens of each of its vLLM blocks.
        hashes: for each vLLM block, the last hash that covers it.
        parent: hash of the vLLM block before it; None at the beginning of a prompt.
        tokens: all its tokens.
        extra_keys: see `event_extra_keys`.
        request: fields that identify the request's adapter.
    """

    position: int
    group: int
    block_size: int
    hashes: Sequence[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    extra_keys: list[Any] | None
    request: dict[str, Any]


class BlockEvents:
    """Reports the loadable blocks of one engine. Single-threaded.

    Args:
        cache: the cache of the engine; watched from now on.
        keys: makes the keys of blocks.
        has_stamps: whether keys may end with the stamp of a LoRA adapter. Blocks that are on disk
            at the start may then be those of an adapter that has changed, so they are not reported
            until a request asks for them.
        traits: more fields of a `BlockStored`, by vLLM's number of the KV cache group.
    """

    def __init__(
        self,
        cache: KVCache,
        keys: BlockKeys,
        has_stamps: bool,
        traits: Mapping[int, dict[str, Any]],
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._has_stamps = has_stamps
        self._traits = traits
        self._described: dict[bytes, Description] = {}
        self._told: dict[Medium, dict[bytes, Sequence[bytes]]] = {m: {} for m in Medium}
        self._groups: dict[tuple[Medium, bytes], int] = {}
        self._shared: dict[Medium, Counter[bytes]] = {m: Counter() for m in Medium}
        self._again: list[bytes] = []
        self._leaving: set[bytes] = set()  # left host memory while a lower tier is given them
        self._failed = False
        cache.watch()

    def describe(self, request: Request, group: Group, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Blocks of `request` have got a slot in host memory; blocks without one are left out.

        Args:
            request: read now; not kept.
            group: group of the blocks.
            blocks: position in the prefix and key of each.
        """
        for position, key in blocks:
            if key in self._described or self._cache.missing((key,)):
                continue
            self._described[key] = self._description(request, group, position)
            if key in self._told[Medium.DISK]:
                self._again.append(key)

    @property
    def pending(self) -> bool:
        """Whether `take` has changes to report. After an error, False until `take` succeeds: an
        engine at rest does not repeat it for ever."""
        return not self._failed and (bool(self._again) or self._cache.has_changes)

    def take(self) -> list[KVCacheEvent]:
        """The events of changes since the last call, removals first. Many changes take several
        calls; see `pending`."""
        self._failed = True
        events = self._take()
        self._failed = False
        return events

    def _take(self) -> list[KVCacheEvent]:
        changes = self._cache.drain_changes()
        if not (changes or self._again or self._leaving):
            return []
        again, self._again = self._again, []
        on_disk = self._told[Medium.DISK]
        # Looked at after the changes: one of them may be that it has gone.
        still_there = (Change(Medium.DISK, key, True) for key in again if key in on_disk)
        removed: dict[tuple[Medium, int], list[bytes]] = defaultdict(list)
        stored: list[tuple[int, KVCacheEvent]] = []
        gone, self._leaving = list(self._leaving), set()
        for medium, key, loadable in itertools.chain(changes, still_there):
            told_group = self._groups.pop((medium, key), 0)
            if not loadable:
                removed[medium, told_group] += self._remove(medium, key)
                if medium is Medium.HOST:
                    gone.append(key)
                continue
            description = self._described.get(key)
            group, hashes = self._known(key, description)
            self._groups[medium, key] = group
            if self._told[medium].get(key) == hashes:
                continue
            # Told before, but without all that is known now.
            removed[medium, told_group] += self._remove(medium, key)
            new = self._add(medium, key, hashes)
            if hashes:
                position = -1 if description is None else description.position
                stored.append((position, self._stored(medium, group, hashes[-new:], description)))
        for key in gone:
            if self._cache.missing((key,)):
                self._forget(key)
        # A block's prefix before the block.
        stored.sort(key=lambda each: each[0])
        return [self._removed(*where, hashes) for where, hashes in removed.items() if hashes] + [
            event for _, event in stored
        ]

    def _known(self, key: bytes, description: Description | None) -> tuple[int, Sequence[bytes]]:
        """The group of a block and the hashes to report of it."""
        if description is not None:
            return description.group, description.hashes
        if self._has_stamps:
            return 0, ()
        origin = self._keys.origin(key)
        return (0, ()) if origin is None else (origin[0], (origin[1],))

    def _add(self, medium: Medium, key: bytes, hashes: Sequence[bytes]) -> int:
        """Record a block as reported; returns how many of its last hashes are new."""
        self._told[medium][key] = hashes
        shared = self._shared[medium]
        known = 0
        # The last one is the block's own.
        for each in hashes[:-1]:
            shared[each] += 1
            known += shared[each] > 1
        return len(hashes) - known

    def _remove(self, medium: Medium, key: bytes) -> list[bytes]:
        """Record a block as removed; returns the hashes that no other block has."""
        hashes = self._told[medium].pop(key, ())
        shared = self._shared[medium]
        gone = []
        for each in hashes[:-1]:
            shared[each] -= 1
            if not shared[each]:
                del shared[each]
                gone.append(each)
        return gone + list(hashes[-1:])

    def _forget(self, key: bytes) -> None:
        """Host memory has evicted a block: its description is kept until lower tiers have it."""
        if self._cache.is_demoting(key):
            self._leaving.add(key)
            return
        self._described.pop(key, None)

    def _description(self, request: Request, group: Group, position: int) -> Description:
        size, hash_tokens = group.engine_block_tokens, self._keys.hash_tokens
        begin = position * group.block_tokens
        starts = range(begin, begin + group.block_tokens, size)
        adapter = request.lora_request
        return Description(
            position=position,
            group=group.index,
            block_size=size,
            hashes=tuple(request.block_hashes[(at + size) // hash_tokens - 1] for at in starts),
            parent=request.block_hashes[begin // hash_tokens - 1] if begin else None,
            tokens=request.all_token_ids[starts.start : starts.stop],
            extra_keys=event_extra_keys(request, starts, size),
            request={
                "lora_id": None if adapter is None else adapter.adapter_id,
                "lora_name": None if adapter is None else adapter.name,
                "session_id": getattr(request, "session_id", None),
            },
        )

    def _stored(
        self,
        medium: Medium,
        group: int,
        hashes: Sequence[bytes],
        description: Description | None,
    ) -> KVCacheEvent:
        """The event of the last `hashes` of a block; unknown fields are empty, as in the events of
        vLLM's own connectors."""
        if description is None:
            fields: dict[str, Any] = {
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "lora_name": None,
            }
        else:
            known = len(description.hashes) - len(hashes)
            parent = description.hashes[known - 1] if known else description.parent
            extra_keys = description.extra_keys
            fields = {
                "parent_block_hash": None if parent is None else event_hash(parent),
                "token_ids": list(description.tokens[known * description.block_size :]),
                "block_size": description.block_size,
                "extra_keys": None if extra_keys is None else extra_keys[known:],
                **description.request,
                **self._traits.get(group, {}),
            }
        return block_stored(
            block_hashes=[event_hash(each) for each in hashes],
            medium=MEDIA[medium],
            group_idx=group,
            locality=_LOCALITY,
            **fields,
        )

    def _removed(self, medium: Medium, group: int, hashes: Sequence[bytes]) -> KVCacheEvent:
        return block_removed(
            block_hashes=[event_hash(each) for each in hashes],
            medium=MEDIA[medium],
            group_idx=group,
            locality=_LOCALITY,
        )


def make_events(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    cache: KVCache,
    keys: BlockKeys,
) -> BlockEvents | None:
    """What tells KV events; None if the user did not turn them on in vLLM."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    return BlockEvents(
        cache,
        keys,
        has_stamps=vllm_config.lora_config is not None,
        traits=group_traits(kv_cache_config),
    )
