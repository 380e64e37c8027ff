# SPDX-License-Identifier: Apache-2.0
"""The keys of SGLang's pages: of requests, and of prompts that are no requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from flexkv.engine.key_epoch import KeyEpoch
from flexkv.operators.engine_door import PART_BLOCKS
from flexkv.operators.verbs import PromptQuestion
from flexkv.types.packed_keys import PackedKeys
from flexkv_kernels.block_index import pack_keys
from flexkv_sglang.hashes import PromptPages, radix_key
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
        """The keys of consecutive pages by SGLang's hashes in hex, which cover prefix, tenant and
        adapter.

        Keys of prompts are kept: SGLang looks a request up in step after step, then loads its pages
        or has them stored. A hash covers all pages before it. So of two parts of prompts whose last
        hashes are equal, one is the end of the other.
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
        """Make the keys of prompts that are no requests."""
        return SglangPromptKeys(self.epoch, page_size, is_bigram=is_bigram, trailing=trailing)


class SglangPromptKeys:
    """See `flexkv.operators.engine_door.PromptKeys`. Any thread may call it.

    Args:
        epoch: of the engine's keys; borrowed.
        page_size: tokens of a page, which is a block.
        is_bigram: whether SGLang hashes pairs of tokens.
    """

    def __init__(
        self, epoch: KeyEpoch, page_size: int, *, is_bigram: bool, trailing: TrailingPages
    ) -> None:
        self._epoch = epoch
        self._is_bigram = is_bigram
        self._trailing = trailing
        self.block_tokens = page_size

    def count(self, question: PromptQuestion) -> int:
        if question.hashes:
            return len(question.hashes)
        return max(0, len(question.tokens) - self._is_bigram) // self.block_tokens

    def parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        pages = max(1, _PART_TOKENS // self.block_tokens)
        prompt = None if question.hashes else self._pages_of(question)
        before: str | None = None
        for start in range(0, self.count(question), pages):
            stop = min(start + pages, self.count(question))
            part = (
                question.hashes[start:stop]
                if prompt is None
                else prompt.hashes(start, stop, before)
            )
            before = part[-1]
            yield pack_keys(part, self._epoch.end)

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

    def _pages_of(self, question: PromptQuestion) -> PromptPages:
        tokens, salt = array("q", question.tokens), question.cache_salt or None
        key = radix_key(tokens, is_bigram=self._is_bigram, cache_salt=salt)
        return PromptPages(key, self.block_tokens)
