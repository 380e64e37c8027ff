# SPDX-License-Identifier: Apache-2.0
"""The keys of SGLang's pages: of requests, and of prompts that are no requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, cast

from flexkv.engine.key_epoch import KeyEpoch
from flexkv.operators.engine_door import PART_BLOCKS
from flexkv.operators.verbs import PromptQuestion
from flexkv.types.packed_keys import PackedKeys
from flexkv_kernels.block_index import pack_keys
from flexkv_sglang.trailing import NONE_TRAILING, TrailingPages, TrailingPool

_KEPT = 1 << 17
"""The most keys that are kept, about 6 MB: those of some long prompts."""

_LEAST = 64
"""Fewer keys are not kept: to make them takes 3 us."""


_STATE_TOKENS = 256
"""Tokens before the end of a prompt whose states are taken with it. SGLang keeps states behind
multiples of 64 tokens."""

_PART_TOKENS = 1024
"""Tokens of a prompt that is no request that are hashed at once: about 0.1 ms."""


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

    def of_prompts(
        self, page_size: int, *, is_bigram: bool, trailing: TrailingPages = NONE_TRAILING
    ) -> SglangPromptKeys:
        """Make the keys of prompts that are no requests; see `SglangPromptKeys`."""
        return SglangPromptKeys(self, page_size, is_bigram=is_bigram, trailing=trailing)


class SglangPromptKeys:
    """See `flexkv.operators.engine_door.PromptKeys`. Any thread may call it.

    Args:
        page_keys: those of the engine; only its epoch is read.
        page_size: tokens of a page, which is a block.
        is_bigram: whether SGLang hashes pairs of tokens.
        trailing: the pages of which a hit needs the last.

    Attributes:
        block_tokens: tokens of a block.
    """

    def __init__(
        self, page_keys: PageKeys, page_size: int, *, is_bigram: bool, trailing: TrailingPages
    ) -> None:
        self._page_keys = page_keys
        self._is_bigram = is_bigram
        self._trailing = trailing
        self.block_tokens = page_size

    def count(self, question: PromptQuestion) -> int:
        if question.hashes:
            return len(question.hashes)
        return max(0, len(question.tokens) - self._is_bigram) // self.block_tokens

    def parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        pages = max(1, _PART_TOKENS // self.block_tokens)
        hashes = question.hashes or None
        key = None if hashes else self._key(question)
        before: str | None = None
        for start in range(0, self.count(question), pages):
            stop = min(start + pages, self.count(question))
            part = self._hash(key, start, stop, before) if hashes is None else hashes[start:stop]
            before = part[-1]
            yield pack_keys(part, self._page_keys.epoch.end)

    def others(
        self, question: PromptQuestion, blocks: int | None = None
    ) -> Iterator[Sequence[bytes]]:
        """See `PromptKeys.others`. The hit of a request that is just the prompt may be a page
        shorter, since SGLang computes the last token."""
        start = 0
        for part in self.parts(question) if self._trailing else ():
            for pool in self._trailing.pools:
                keys = part
                if blocks is not None:
                    first = max(0, blocks - self._last_of(pool) - start)
                    keys = part[first : max(0, blocks - start)]
                step = max(1, PART_BLOCKS // pool.parts)
                for begin in range(0, len(keys), step):
                    yield pool.keys_of(keys[begin : begin + step])
            start += len(part)

    def _last_of(self, pool: TrailingPool) -> int:
        """How many pages before the end of a prompt may have what a hit of it needs."""
        if pool.are_states:
            return max(2, -(-_STATE_TOKENS // self.block_tokens))
        return pool.reach + 1

    def _key(self, question: PromptQuestion) -> Any:
        """SGLang's key of a prompt."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", question.tokens), cache_salt=question.cache_salt or None)
        view, _ = key.maybe_to_bigram_view(self._is_bigram)
        return view

    def _hash(self, key: Any, start: int, stop: int, before: str | None) -> Sequence[str]:
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        size = self.block_tokens
        part = key[start * size : stop * size]
        return cast("list[str]", get_storage_hash_str(part, before, page_size=size))
