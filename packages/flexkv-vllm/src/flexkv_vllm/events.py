# SPDX-License-Identifier: Apache-2.0
"""KV events: reports the blocks that FlexKV can load to vLLM's subscribers.

An event names a FlexKV block by vLLM's hash of its end, since a router looks these up. A block that
holds several of vLLM's is loaded whole or not at all, so the hashes within it are not announced.

Blocks count as told once vLLM has taken their events. After an error nobody knows what subscribers
know: all that was told is taken back, and all blocks are told again. Now and then some blocks are
compared with what the cache has; if they differ, the same happens.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from flexkv.client import CacheClient
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
from flexkv_vllm.pool import Pool
from flexkv_vllm.settings import emits_events

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_LOCALITY = "LOCAL"

_BLOCKS_PER_CALL = 2048
"""The most blocks of earlier keys whose removal one call reports, and the most that it reports
again: some milliseconds of work, as for the changes of a tier. Not tuned."""

_LOST = 4096
"""The most descriptions that are kept of blocks that host memory has lost and no lower tier has
reported: more than the blocks of a failed load whose writes to disk have not ended. Not tuned."""


_SAMPLED = 4096
"""Blocks, of those seen lately, that the audit knows. Not tuned."""

_AUDITED = 32
"""Blocks that one audit looks at: some microseconds. Not tuned."""

_AUDIT_TAKES = 64
"""Calls of `take` between two audits, so that the sample is seen in 8,192 steps. Not tuned."""

_MOST_PAUSES = 10
"""After so many errors in a row, 1,023 calls of `take` pass before all is told again: listing all
blocks in each step would cost much. Not tuned."""

Name: TypeAlias = tuple[int, bytes] | None
"""Group and hash of a block in events; None if there is no event for it."""

_TOKEN, _TOKEN_BYTES = "<u4", 4


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a FlexKV block's event, apart from its medium. Kept while host memory has it,
    and for a while longer if a lower tier may be writing it. A disk keeps it as text.

    Attributes:
        position: of the block in its prefix, in FlexKV blocks.
        group: vLLM's number of its KV cache group.
        hash: the last hash that covers it.
        parent: hash of the block before it; None at the beginning of a prompt.
        packed: all its tokens, 4 bytes each, little-endian; see `pack_tokens`.
        extra_keys: see `event_extra_keys`.
        adapter: number and name of the request's adapter; None for both if it has none.
        session: the id of the request's session; None if it is not known. No disk keeps it.
    """

    position: int
    group: int
    hash: bytes
    parent: bytes | None
    packed: bytes
    extra_keys: list[Any] | None
    adapter: tuple[int | None, str | None]
    session: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Its token ids."""
        tokens: list[int] = np.frombuffer(self.packed, _TOKEN).tolist()
        return tokens

    def encode(self) -> bytes:
        """The text that a disk keeps."""
        return _encoder.encode(msgspec.structs.replace(self, session=None))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes."""
    return np.array(tokens, _TOKEN).tobytes()


def decode(text: bytes, key: bytes) -> Description | None:
    """Read what `Description.encode` made, in this process or another; None if it does not describe
    the block of `key`, which begins with the block's hash."""
    try:
        kept = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not kept.hash or not key.startswith(kept.hash) or len(kept.packed) % _TOKEN_BYTES:
        return None
    return msgspec.structs.replace(kept, extra_keys=_tuples(kept.extra_keys))


def _tuples(keys: list[Any] | None) -> list[Any] | None:
    """Extra keys with tuples in place of lists, as they were before `encode`."""

    def made(each: Any) -> Any:
        return tuple(map(made, each)) if isinstance(each, list) else each

    return None if keys is None else [made(each) for each in keys]


@dataclass(slots=True)
class _EventBatch:
    """What one call of `take` tells.

    Attributes:
        gone, new: by medium and key, blocks that are told no more, and those that are.
        outdated: blocks of an earlier epoch that are told no more, and where they are noted.
        removed: hashes of `gone`, by medium and group.
        stored: events of `new`, each after the position of its block in its prefix.
    """

    gone: set[tuple[Medium, bytes]] = field(default_factory=set)
    new: dict[tuple[Medium, bytes], Name] = field(default_factory=dict)
    outdated: list[tuple[dict[bytes, Name], bytes]] = field(default_factory=list)
    removed: dict[tuple[Medium, int], list[bytes]] = field(
        default_factory=lambda: defaultdict(list)
    )
    stored: list[tuple[int, KVCacheEvent]] = field(default_factory=list)

    def remove(self, medium: Medium, key: bytes, name: Name) -> None:
        """Tell that a block has left."""
        self.new.pop((medium, key), None)
        self.gone.add((medium, key))
        if name is not None:
            self.removed[medium, name[0]].append(name[1])


class BlockEvents:
    """Reports the loadable blocks of one engine. Single-threaded.

    When vLLM resets its own prefix cache, it reports that the engine has no block at all, and
    indexes of routers then forget the blocks of all media. All reported blocks are therefore
    reported again.

    Args:
        cache: the cache of the engine; watched from now on.
        has_stamps: whether keys may end with the stamp of a LoRA adapter. Blocks that are on disk
            at the start may then be those of an adapter that has changed, so they are not reported
            until a request asks for them.
        traits: more fields of a `BlockStored`, by vLLM's number of the KV cache group.
    """

    def __init__(
        self,
        cache: CacheClient,
        keys: BlockKeys,
        has_stamps: bool,
        traits: Mapping[int, dict[str, Any]],
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._has_stamps = has_stamps
        self._traits = traits
        self._epoch = keys.epoch.end
        self._told: dict[Medium, dict[bytes, Name]] = {medium: {} for medium in Medium}
        self._outdated: deque[tuple[Medium, dict[bytes, Name]]] = deque()
        self._described: dict[bytes, Description] = {}
        self._own: set[bytes] = set()  # on disk, and described by this process
        self._bare: set[bytes] = set()  # on disk, and reported without a description
        self._again: list[bytes] = []  # described after the event for the disk
        self._unsure: set[bytes] = set()  # described, and may have no slot in host memory
        self._lost: dict[bytes, None] = {}  # described, not in host memory, not yet on disk
        self._failed = False
        self._errors = self._pauses = 0
        self._takes = self._audited = self._heard = 0
        self._sample: dict[int, bytes] = {}
        self._suspects: tuple[int, set[tuple[Medium, bytes]]] = 0, set()
        self._pool: Pool | None = None
        self._pool_blocks: object = None
        self._repeated: Iterator[tuple[Medium, bytes]] | None = None
        cache.watch()

    def bind_pool(self, pool: Pool) -> None:
        """Follow the resets of vLLM's own prefix cache; borrowed."""
        self._pool, self._pool_blocks = pool, pool.blocks_by_hash

    def describe(self, request: Request, group: Group, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Blocks of `request` have got a slot in host memory.

        Args:
            request: read now; not kept.
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
            self._note(key)
            if key in self._bare:
                self._again.append(key)
        if self._cache.info.is_shared:
            self._keep(fresh)

    @property
    def pending(self) -> bool:
        """Whether `take` has changes to report. After an error, False until `take` succeeds: an
        engine at rest does not repeat it for ever."""
        left = self._again or self._outdated or self._repeated or self._was_reset
        epoch_ended = self._epoch != self._keys.epoch.end
        return not self._failed and (bool(left) or epoch_ended or self._cache.status.has_changes)

    def take(self) -> list[KVCacheEvent]:
        """The events of changes since the last call, removals first. Many changes take several
        calls; see `pending`."""
        if self._pauses:
            self._pauses -= 1
            return []
        failed, self._failed = self._failed, True
        self._pauses = (1 << self._errors) - 1
        self._errors = min(self._errors + 1, _MOST_PAUSES)
        if failed:
            self._begin_anew()
        batch = _EventBatch()
        self._fill(batch)
        # A block's prefix before the block.
        batch.stored.sort(key=lambda each: each[0])
        events = [self._removed(*where, hashes) for where, hashes in batch.removed.items()]
        events += [event for _, event in batch.stored]
        # From here on vLLM has them.
        for medium, key in batch.gone:
            self._told[medium].pop(key, None)
        for (medium, key), name in batch.new.items():
            self._told[medium][key] = name
        for told, key in batch.outdated:
            del told[key]
        while self._outdated and not self._outdated[0][1]:
            self._outdated.popleft()
        self._failed, self._errors, self._pauses = False, 0, 0
        return events

    def _fill(self, batch: _EventBatch) -> None:
        self._follow_epoch()
        self._follow_reset()
        if self._outdated:
            self._take_outdated(batch)
            return  # before new blocks, which may have the same hashes
        if self._repeated is not None:
            self._repeat(batch, self._repeated)
            return
        changes = self._cache.drain_changes()
        self._heard += bool(changes)
        for each in changes:
            for key in each.removed:
                self._remove(batch, each.medium, key)
            if each.medium is Medium.HOST:
                self._unsure.update(self._described.keys() & each.removed)
        # What the disk has kept of new blocks, and what other engines say of theirs.
        texts = {key: text for each in changes for key, text in each.texts.items()}
        fresh: dict[bytes, Description] = {}
        again, self._again = self._again, []
        for key in again:
            description = self._described.get(key)
            if description and key in self._bare:
                self._remove(batch, Medium.DISK, key)
                fresh[key] = description
                self._add(batch, Medium.DISK, key, description)
        fresh |= self._add_all(batch, changes, texts)
        if not self._cache.info.is_shared:
            self._keep(fresh)
        if self._unsure:
            self._forget(batch)
        self._takes += 1
        status = self._cache.status
        comes = batch.new or batch.gone or status.has_changes or status.awaits_changes
        if self._takes >= _AUDIT_TAKES and not (comes or status.disabled):
            self._takes = 0
            self._audit()

    def _begin_anew(self) -> None:
        """Take back all that was told, and tell all blocks that are there."""
        self._outdate()
        self._bare.clear()
        self._again.clear()
        self._repeated = None
        self._cache.watch()

    def _outdate(self) -> None:
        """What was told is to be taken back before anything else is told."""
        self._outdated += (each for each in self._told.items() if each[1])
        self._told = {medium: {} for medium in Medium}

    def _audit(self) -> None:
        """Compare some blocks with what the cache has. A service's messages may be older than its
        index: a block differs if it does so twice, and the service has said something since."""
        start, self._audited = self._audited, (self._audited + _AUDITED) % _SAMPLED
        found = (self._sample.get(start + at) for at in range(_AUDITED))
        heard, suspects = self._suspects
        keys = [*{*(key for key in found if key), *(key for _, key in suspects)}]
        differing: set[tuple[Medium, bytes]] = set()
        for medium, there in self._cache.where(keys).items():
            if medium.is_shared:
                continue
            # A stalled disk of this process has no block, and counts as having all.
            only_new = medium is not Medium.HOST and not self._cache.info.is_shared
            told = self._told[medium]
            differing.update(
                (medium, key)
                for key, is_there in zip(keys, there, strict=True)
                if is_there is not None and is_there != (key in told) and (is_there or not only_new)
            )
        if differing & suspects and (self._heard > heard or not self._cache.info.is_shared):
            logger.warning(
                "KV events differ from the cache in %d of %d blocks that were compared; "
                "all blocks are told again",
                len(differing & suspects),
                len(keys),
            )
            self._begin_anew()
            differing = set()
        if not differing & suspects:
            self._suspects = self._heard, differing

    def _add_all(
        self, batch: _EventBatch, changes: Iterable[Changes], texts: Mapping[bytes, bytes]
    ) -> dict[bytes, Description]:
        """Tell of new blocks. Returns what the disk has not kept of its own."""
        fresh: dict[bytes, Description] = {}
        for each in changes:
            for key in each.added:
                description = self._described.get(key)
                if each.medium is Medium.DISK and description is not None and key not in texts:
                    fresh[key] = description
                description = description or self._decoded(key, texts)
                if each.medium is Medium.HOST and description is not None:
                    self._described[key] = description
                self._add(batch, each.medium, key, description)
        return fresh

    def _decoded(self, key: bytes, texts: Mapping[bytes, bytes]) -> Description | None:
        if key not in texts or (self._has_stamps and key not in self._own):
            return None
        return None if self._keys.origin(key) is None else decode(texts[key], key)

    def _keep(self, fresh: Mapping[bytes, Description]) -> None:
        """Let the cache keep the descriptions of new blocks."""
        if fresh:
            self._cache.describe({key: each.encode() for key, each in fresh.items()})

    def _follow_epoch(self) -> None:
        """If the keys have changed, no lookup finds a block that was reported or described."""
        if self._epoch == self._keys.epoch.end:
            return
        self._epoch = self._keys.epoch.end
        self._outdate()
        for described in (self._described, self._own, self._bare, self._again, self._unsure):
            described.clear()
        self._lost.clear()
        self._sample.clear()
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
        # The disk has the descriptions of its blocks: they are reported as after a restart.
        self._cache.watch(lower=True)
        self._told |= {medium: {} for medium in BELOW}
        self._bare.clear()
        self._again.clear()
        # Until the last of them is reported, nothing is added or removed. A block comes after those
        # that it builds on.
        self._repeated = ((medium, key) for medium, told in self._told.items() for key in told)

    def _repeat(self, batch: _EventBatch, repeated: Iterator[tuple[Medium, bytes]]) -> None:
        """Report some of the blocks again that were reported before the reset."""
        some = list(islice(repeated, _BLOCKS_PER_CALL))
        for at, (medium, key) in enumerate(some):
            name = self._told[medium][key]
            if name is not None:
                description = self._described.get(key)
                batch.stored.append((at, self._stored(medium, name, description)))
        if len(some) < _BLOCKS_PER_CALL:
            self._repeated = None

    def _take_outdated(self, batch: _EventBatch) -> None:
        """Report the removal of some outdated blocks."""
        left = _BLOCKS_PER_CALL
        for medium, told in self._outdated:
            for key, name in islice(reversed(told.items()), left):
                batch.outdated.append((told, key))
                if name is not None:
                    batch.removed[medium, name[0]].append(name[1])
            left = _BLOCKS_PER_CALL - len(batch.outdated)

    def _name(self, key: bytes, description: Description | None) -> Name:
        """What to report of a block."""
        if description is not None:
            return description.group, description.hash
        return None if self._has_stamps else self._keys.origin(key)

    def _add(
        self, batch: _EventBatch, medium: Medium, key: bytes, description: Description | None
    ) -> None:
        """Tell of a new block."""
        name = self._name(key, description)
        batch.new[medium, key] = name
        self._note(key)
        if medium is Medium.DISK:
            if description is None:
                self._bare.add(key)
            elif self._has_stamps:
                self._own.add(key)
        if name is not None:
            position = -1 if description is None else description.position
            batch.stored.append((position, self._stored(medium, name, description)))
        if key in self._lost:
            del self._lost[key]
            if medium is not Medium.HOST:
                self._unsure.add(key)

    def _remove(self, batch: _EventBatch, medium: Medium, key: bytes) -> None:
        batch.remove(medium, key, self._told[medium].get(key))
        if medium is Medium.DISK:
            self._bare.discard(key)
            self._own.discard(key)

    def _is_told(self, batch: _EventBatch, medium: Medium, key: bytes) -> bool:
        """Whether a block is told once vLLM has the events of `batch`."""
        place = medium, key
        return place in batch.new or (key in self._told[medium] and place not in batch.gone)

    def _note(self, key: bytes) -> None:
        """The audit looks at this block, until another takes its place."""
        self._sample[int.from_bytes(key[:4], "little") % _SAMPLED] = key

    def _forget(self, batch: _EventBatch) -> None:
        """Discard the descriptions of blocks without a slot in host memory, unless a lower tier may
        be writing them: a failed load removes a block that is being written."""
        keys = list(self._unsure)
        absent = {keys[i] for i in self._cache.missing(keys)}
        # A block that is stored has a slot, and may lose it without a change.
        unsure = self._unsure - absent
        self._unsure = {key for key in unsure if not self._is_told(batch, Medium.HOST, key)}
        for key in absent & self._described.keys():
            if self._is_told(batch, Medium.DISK, key):
                del self._described[key]
            else:
                self._lost[key] = None
        for key in list(islice(self._lost, max(0, len(self._lost) - _LOST))):
            del self._lost[key], self._described[key]

    def _description(self, request: Request, group: Group, position: int) -> Description:
        hash_tokens = self._keys.hash_tokens
        begin, end = position * group.block_tokens, (position + 1) * group.block_tokens
        adapter = request.lora_request
        return Description(
            position=position,
            group=group.index,
            hash=request.block_hashes[end // hash_tokens - 1],
            parent=request.block_hashes[begin // hash_tokens - 1] if begin else None,
            packed=pack_tokens(request.all_token_ids[begin:end]),
            extra_keys=event_extra_keys(request, begin, end),
            adapter=(None, None) if adapter is None else (adapter.adapter_id, adapter.name),
            session=getattr(request, "session_id", None),
        )

    def _stored(
        self, medium: Medium, name: tuple[int, bytes], about: Description | None
    ) -> KVCacheEvent:
        """The event of a block; unknown fields are empty, as in the events of vLLM's own
        connectors."""
        group, block_hash = name
        fields: dict[str, Any] = {
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "lora_name": None,
        }
        if about is not None:
            lora_id, lora_name = about.adapter
            tokens = about.tokens
            fields = {
                "parent_block_hash": None if about.parent is None else event_hash(about.parent),
                "token_ids": tokens,
                "block_size": len(tokens),
                "extra_keys": about.extra_keys,
                "lora_id": lora_id,
                "lora_name": lora_name,
                "session_id": about.session,
                **self._traits.get(group, {}),
            }
        return block_stored(
            block_hashes=[event_hash(block_hash)],
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
    if not emits_events(vllm_config):
        return None
    return BlockEvents(
        cache,
        keys,
        has_stamps=vllm_config.lora_config is not None,
        traits=group_traits(kv_cache_config),
    )
