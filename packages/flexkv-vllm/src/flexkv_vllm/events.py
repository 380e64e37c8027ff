# SPDX-License-Identifier: Apache-2.0
"""KV events: reports the blocks that FlexKV can load to vLLM's subscribers.

A FlexKV block holds several of vLLM's blocks, and is loadable as a whole. Events contain vLLM's own
block hashes, since a router looks these up. Each hash of a FlexKV block is reported once for each
medium. FlexKV blocks that begin alike and end differently share their first vLLM blocks: these are
reported with the first FlexKV block that has them, and removed with the last.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from flexkv.client import CacheClient
from flexkv.engine.key_epoch import KeyEpoch
from flexkv.engine.scheduler.groups import Group
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.types.changes import BELOW, Changes, Medium
from flexkv_vllm.compat.events import (
    MEDIA,
    block_removed,
    block_stored,
    event_extra_keys,
    event_hash,
    group_traits,
)
from flexkv_vllm.kept_descriptions import (
    KeptDescription,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)
from flexkv_vllm.pool import Pool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_LOCALITY = "LOCAL"

_BLOCKS_PER_CALL = 2048
"""The most blocks of earlier keys whose removal one call reports, and the most that it reports
again: some milliseconds of work, as for the changes of a tier. Not tuned."""

_LOST = 4096
"""The most descriptions that are kept of blocks that host memory has lost and no lower tier has
reported: more than the blocks of a failed load whose writes to disk have not ended. Not tuned."""


class NamedKeys(Protocol):
    """What the keys of blocks say; see `BlockKeys`, whose attributes these are."""

    @property
    def hash_tokens(self) -> int: ...
    @property
    def epoch(self) -> KeyEpoch: ...
    def origin(self, key: bytes) -> tuple[int, bytes] | None:
        """See `BlockKeys.origin`."""
        ...


@dataclass(frozen=True, slots=True)
class Description:
    """The fields of a FlexKV block's event, apart from its medium. Kept while host memory has it,
    and for a while longer if a lower tier may be writing it.

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

    @property
    def is_kept(self) -> bool:
        """Whether the disk keeps it: it has no adapter, and no keys beside its tokens."""
        return self.request["lora_id"] is None and not any(self.extra_keys or ())

    def encode(self) -> bytes:
        """What the disk keeps of it."""
        kept = KeptDescription(
            self.position,
            self.group,
            self.block_size,
            tuple(self.hashes),
            self.parent,
            pack_tokens(self.tokens),
        )
        return encode(kept)

    @classmethod
    def decode(cls, text: bytes, origin: tuple[int, bytes]) -> Description | None:
        """What the disk has kept of the block of `origin`; None if `text` describes another."""
        kept = decode(text, origin)
        if kept is None:
            return None
        return cls(
            kept.position,
            kept.group,
            kept.block_size,
            kept.hashes,
            kept.parent,
            unpack_tokens(kept.tokens),
            None,
            {"lora_id": None, "lora_name": None},
        )


class _Reported:
    """The blocks of a medium for which there are events.

    Attributes:
        named: by key, the group and the hashes of each block as its events named them.
    """

    def __init__(self) -> None:
        self.named: dict[bytes, tuple[int, Sequence[bytes]]] = {}
        self._shared: Counter[bytes] = Counter()  # blocks with each hash that is not their last

    def add(self, key: bytes, group: int, hashes: Sequence[bytes]) -> int:
        """Note a new block. Returns how many of its hashes, from the first on, others have."""
        self.named[key] = group, hashes
        shared, known = self._shared, 0
        # The last one is the block's own.
        for each in hashes[:-1]:
            shared[each] += 1
            known += shared[each] > 1
        return known

    def remove(self, key: bytes) -> tuple[int, Sequence[bytes]]:
        """Forget a block. Returns its group and those of its hashes that no other block has; none
        for an unknown block: an error may have lost the changes of an earlier call."""
        group, hashes = self.named.pop(key, (0, ()))
        shared, gone = self._shared, []
        for each in hashes[:-1]:
            shared[each] -= 1
            if not shared[each]:
                del shared[each]
                gone.append(each)
        return group, [*gone, *hashes[-1:]]

    def is_shared(self, block_hash: bytes) -> bool:
        """Whether several blocks begin with vLLM's block of this hash."""
        return self._shared[block_hash] > 1


class BlockEvents:
    """Reports the loadable blocks of one engine. Single-threaded.

    When vLLM resets its own prefix cache, it reports that the engine has no block at all, and
    indexes of routers then forget the blocks of all media. All reported blocks are therefore
    reported again.

    Args:
        cache: the cache of the engine; watched from now on.
        keys: of the blocks.
        has_stamps: whether keys may end with the stamp of a LoRA adapter. Blocks that are on disk
            at the start may then be those of an adapter that has changed, so they are not reported
            until a request asks for them.
        traits: more fields of a `BlockStored`, by vLLM's number of the KV cache group.
    """

    def __init__(
        self,
        cache: CacheClient,
        keys: NamedKeys,
        has_stamps: bool,
        traits: Mapping[int, dict[str, Any]],
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._has_stamps = has_stamps
        self._traits = traits
        self._epoch = keys.epoch.end
        self._outdated: deque[tuple[Medium, _Reported]] = deque()
        self._described: dict[bytes, Description] = {}
        self._reported = {medium: _Reported() for medium in Medium}
        self._bare: set[bytes] = set()  # on disk, and reported without a description
        self._again: list[bytes] = []  # described after the event for the disk
        self._unsure: set[bytes] = set()  # described, and may have no slot in host memory
        self._lost: dict[bytes, None] = {}  # described, not in host memory, not yet on disk
        self._failed = self._was_cleared = False
        self._pool: Pool | None = None
        self._pool_blocks: object = None
        self._repeated: Iterator[tuple[Medium, bytes]] | None = None
        self._named_again: set[tuple[Medium, bytes]] = set()
        cache.watch()

    def bind_pool(self, pool: Pool) -> None:
        """Follow the resets of vLLM's own prefix cache; borrowed."""
        self._pool, self._pool_blocks = pool, pool.blocks_by_hash

    def describe(self, request: Request, group: Group, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Blocks of `request` have got a slot in host memory.

        Args:
            request: read now; not kept.
            group: group of the blocks.
            blocks: position in the prefix and key of each.
        """
        self._follow_epoch()
        fresh: dict[bytes, Description] = {}
        for position, key in blocks:
            if key in self._described and key not in self._lost:
                continue
            self._described[key] = fresh[key] = self._description(request, group, position)
            self._lost.pop(key, None)
            self._unsure.add(key)
            if key in self._bare:
                self._again.append(key)
        if self._cache.info.is_shared:
            self._keep(fresh)

    def cleared(self) -> None:
        """The cache was cleared, and its keys may be stored again. The next changes say which have
        left."""
        self._was_cleared = True

    @property
    def pending(self) -> bool:
        """Whether `take` has changes to report. After an error, False until `take` succeeds: an
        engine at rest does not repeat it for ever."""
        left = self._again or self._outdated or self._repeated or self._was_reset
        epoch_ended = self._epoch != self._keys.epoch.end
        return not self._failed and (bool(left) or epoch_ended or self._cache.has_changes)

    def take(self) -> list[KVCacheEvent]:
        """The events of changes since the last call, removals first. Many changes take several
        calls; see `pending`."""
        self._failed = True
        events = self._take()
        self._failed = False
        return events

    def _take(self) -> list[KVCacheEvent]:
        self._follow_epoch()
        self._follow_reset()
        early = self._take_outdated() if self._outdated else []
        if self._outdated:
            return early  # before new blocks, which may have the same hashes
        if self._repeated is not None:
            early += self._repeat(self._repeated)
            if self._repeated is not None:
                return early
        changes = self._cache.drain_changes()
        removed: dict[tuple[Medium, int], list[bytes]] = defaultdict(list)
        stored: list[tuple[int, KVCacheEvent]] = []
        for each in changes:
            for key in each.removed:
                self._remove(each.medium, key, removed)
            if each.medium is Medium.HOST:
                self._unsure.update(self._described.keys() & each.removed)
        texts = {} if self._has_stamps else self._kept_of(changes)
        fresh: dict[bytes, Description] = {}
        again, self._again = self._again, []
        for key in again:
            description = self._described.get(key)
            if description and key in self._bare:
                self._remove(Medium.DISK, key, removed)
                fresh[key] = description
                self._add(Medium.DISK, key, stored, description)
        fresh |= self._add_all(changes, texts, stored)
        if not self._cache.info.is_shared:
            self._keep(fresh)
        if self._unsure:
            self._forget()
        self._was_cleared = self._was_cleared and self._cache.has_changes
        # A block's prefix before the block.
        stored.sort(key=lambda each: each[0])
        early += [self._removed(*each, hashes) for each, hashes in removed.items() if hashes]
        return early + [event for _, event in stored]

    def _add_all(
        self,
        changes: Iterable[Changes],
        texts: Mapping[bytes, bytes],
        stored: list[tuple[int, KVCacheEvent]],
    ) -> dict[bytes, Description]:
        """Append the events of new blocks to `stored`. Returns what the disk has not kept of its
        own."""
        fresh: dict[bytes, Description] = {}
        for each in changes:
            for key in each.added:
                description = self._described.get(key)
                if each.medium is Medium.DISK and description is not None and key not in texts:
                    fresh[key] = description
                description = description or self._decoded(key, texts)
                if each.medium is Medium.HOST and description is not None:
                    self._described[key] = description
                self._add(each.medium, key, stored, description)
        return fresh

    def _kept_of(self, changes: Iterable[Changes]) -> Mapping[bytes, bytes]:
        """What the disk has kept of new blocks, and what other engines say of theirs."""
        is_shared = self._cache.info.is_shared
        kept = [each for each in changes if is_shared or each.medium is Medium.DISK]
        added = [key for each in kept for key in each.added]
        return self._cache.take_descriptions(added) if added else {}

    def _decoded(self, key: bytes, texts: Mapping[bytes, bytes]) -> Description | None:
        origin = self._keys.origin(key) if key in texts else None
        return None if origin is None else Description.decode(texts[key], origin)

    def _keep(self, fresh: Mapping[bytes, Description]) -> None:
        """Let the cache keep the descriptions of new blocks. Those of adapters may have changed by
        the next start."""
        if self._has_stamps:
            return
        kept = {key: each.encode() for key, each in fresh.items() if each.is_kept}
        if kept:
            self._cache.describe(kept)

    def _follow_epoch(self) -> None:
        """If the keys have changed, no lookup finds a block that was reported or described."""
        if self._epoch == self._keys.epoch.end:
            return
        self._epoch = self._keys.epoch.end
        self._outdated += (each for each in self._reported.items() if each[1].named)
        self._reported = {medium: _Reported() for medium in Medium}
        for described in (self._described, self._bare, self._again, self._unsure, self._lost):
            described.clear()
        self._repeated = None

    @property
    def _was_reset(self) -> bool:
        """Whether vLLM has reset its prefix cache since the last call of `_follow_reset`."""
        return self._pool is not None and self._pool.blocks_by_hash is not self._pool_blocks

    def _follow_reset(self) -> None:
        """If vLLM has reset its prefix cache, begin to report all blocks again."""
        if self._pool is None or not self._was_reset:
            return
        self._pool_blocks = self._pool.blocks_by_hash
        self._named_again.clear()
        # The disk has the descriptions of its blocks: they are reported as after a restart, unless
        # they are about to be removed.
        watches_again = not (self._has_stamps or self._was_cleared)
        if watches_again and self._cache.watch_lower_again():
            self._reported |= {medium: _Reported() for medium in BELOW}
            self._bare.clear()
            self._again.clear()
        # Until the last of them is reported, nothing is added or removed. A block comes after those
        # that it builds on.
        reported = self._reported.items()
        self._repeated = ((medium, key) for medium, each in reported for key in each.named)

    def _repeat(self, repeated: Iterator[tuple[Medium, bytes]]) -> list[KVCacheEvent]:
        """Report some of the blocks again that were reported before the reset."""
        events: list[KVCacheEvent] = []
        some = list(islice(repeated, _BLOCKS_PER_CALL))
        for medium, key in some:
            reported = self._reported[medium]
            group, hashes = reported.named[key]
            shared = [(medium, each) for each in hashes[:-1] if reported.is_shared(each)]
            known = len(self._named_again.intersection(shared))
            self._named_again.update(shared)
            if hashes:
                description = self._described.get(key)
                events.append(self._stored(medium, group, hashes[known:], description))
        if len(some) < _BLOCKS_PER_CALL:
            self._repeated = None
            self._named_again.clear()
        return events

    def _take_outdated(self) -> list[KVCacheEvent]:
        """Report the removal of some outdated blocks."""
        removed: dict[tuple[Medium, int], list[bytes]] = defaultdict(list)
        left = _BLOCKS_PER_CALL
        while self._outdated and left:
            medium, reported = self._outdated[0]
            keys = list(islice(reversed(reported.named), left))
            for key in keys:
                group, hashes = reported.remove(key)
                removed[medium, group] += hashes
            left -= len(keys)
            if not reported.named:
                self._outdated.popleft()
        return [self._removed(*where, hashes) for where, hashes in removed.items() if hashes]

    def _name(self, key: bytes, description: Description | None) -> tuple[int, Sequence[bytes]]:
        """The group of a block and the hashes to report of it."""
        if description is not None:
            return description.group, description.hashes
        if self._has_stamps:
            return 0, ()
        origin = self._keys.origin(key)
        return (0, ()) if origin is None else (origin[0], (origin[1],))

    def _add(
        self,
        medium: Medium,
        key: bytes,
        stored: list[tuple[int, KVCacheEvent]],
        description: Description | None,
    ) -> None:
        """Append the event of a new block to `stored`, after its position in its prefix."""
        group, hashes = self._name(key, description)
        known = self._reported[medium].add(key, group, hashes)
        if medium is Medium.DISK and description is None:
            self._bare.add(key)
        if hashes:
            position = -1 if description is None else description.position
            stored.append((position, self._stored(medium, group, hashes[known:], description)))
        if key in self._lost:
            del self._lost[key]
            if medium is not Medium.HOST:
                del self._described[key]

    def _remove(
        self, medium: Medium, key: bytes, removed: dict[tuple[Medium, int], list[bytes]]
    ) -> None:
        """Add the hashes of a block to `removed`, by medium and group, but those that another block
        has."""
        group, hashes = self._reported[medium].remove(key)
        removed[medium, group] += hashes
        if medium is Medium.DISK:
            self._bare.discard(key)

    def _forget(self) -> None:
        """Discard the descriptions of blocks without a slot in host memory, unless a lower tier may
        be writing them: a failed load removes a block that is being written."""
        keys, on_disk = list(self._unsure), self._reported[Medium.DISK].named
        absent = {keys[i] for i in self._cache.missing(keys)}
        # A block that is stored has a slot, and may lose it without a change.
        self._unsure -= absent | self._reported[Medium.HOST].named.keys()
        for key in absent:
            if key in on_disk:
                del self._described[key]
            else:
                self._lost[key] = None
        for key in list(islice(self._lost, max(0, len(self._lost) - _LOST))):
            del self._lost[key], self._described[key]

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
    cache: CacheClient,
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
