# SPDX-License-Identifier: Apache-2.0
"""Answers vLLM's lookups of one request. vLLM looks up block by block; the cache is asked once for
all blocks of a KV cache group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, get_offload_group_idx

from flexkv.engine.choice.chooser import Left
from flexkv_vllm.offloading.requests import FetchPlace, GroupBlocks, RequestBlocks


class Lookups:
    """The lookups of one request in one step of the engine.

    Args:
        blocks: the request.
        groups: its blocks in each KV cache group.
        local_tokens: tokens that vLLM has itself.
        limit: tokens of the longest hit.
        answers: filled with the results that vLLM may read without a call of `lookup`.

    Attributes:
        lacks: whether a lower tier has some of the blocks.
        left: why the blocks behind the chosen ones are not loaded, and the tokens of the whole hit;
            None if all are loaded.
    """

    def __init__(
        self,
        blocks: RequestBlocks,
        groups: Sequence[GroupBlocks],
        local_tokens: int,
        limit: int,
        answers: dict[bytes, LookupResult],
    ) -> None:
        self.lacks = False
        self.left: tuple[Left, int] | None = None
        self._blocks = blocks
        self._groups = {group.number: group for group in groups}
        self._local_tokens = local_tokens
        self._limit = limit
        self._answers = answers
        self._windows: dict[bytes, LookupResult] = {}
        self._prefixes: dict[int, tuple[Sequence[bytes], Sequence[LookupResult]]] = {}
        self._scattered: dict[bytes, LookupResult] = {}
        self._looked_up: set[int] = set()

    def lookup(self, key: bytes) -> LookupResult:
        """The result for a block that `answers` lacks. The first call for a group finds all of its
        blocks."""
        number = get_offload_group_idx(OffloadKey(key))
        if number not in self._looked_up and number in self._groups:
            self._looked_up.add(number)
            self._find(self._groups[number])
        result = self._answers.get(key) or self._windows.get(key)
        if result is None:
            # vLLM also looks up recurrent states that end inside a block.
            closed = self._limit <= self._local_tokens
            (result,) = (LookupResult.MISS,) if closed else self._blocks.find((key,))
        if result is not LookupResult.MISS and key not in self._answers:
            self._scattered[key] = result
            self.lacks = self.lacks or result is LookupResult.HIT_PENDING
        return result

    def wanted(self) -> list[bytes]:
        """Keys of the blocks that vLLM has found, in order."""
        return [*(key for keys, _ in self._prefixes.values() for key in keys), *self._scattered]

    def pending(self) -> list[bytes]:
        """Keys of those that are not in host memory."""
        found = [zip(*prefix, strict=True) for prefix in self._prefixes.values()]
        pairs = chain(*found, self._scattered.items())
        return [key for key, result in pairs if result is LookupResult.HIT_PENDING]

    @property
    def place(self) -> FetchPlace:
        """The place of the blocks `wanted` in the request."""
        for number, (keys, _) in self._prefixes.items():
            group = self._groups[number]
            return FetchPlace(
                self._first(group), len(keys), group.tokens, is_plain=len(self._groups) == 1
            )
        return FetchPlace(self._limit, 0, 1, is_plain=False)

    def count(self, tokens: int) -> int:
        """The number of blocks to load for a hit of `tokens` tokens behind vLLM's own."""
        hit, total = self._local_tokens + tokens, 0
        for group in self._groups.values():
            blocks = group.until(hit) - self._first(group)
            total += blocks if group.window is None else min(blocks, group.window)
        return total

    def shorten(self, blocks: int) -> None:
        """From now on find no more than the first `blocks` blocks, in a model with one group."""
        for group in self._groups.values():
            end = (self._first(group) + blocks) * group.tokens
            self._limit = end if blocks else self._local_tokens
        self._answers.clear()
        self._windows.clear()
        self._prefixes.clear()
        self._scattered.clear()
        self._looked_up.clear()
        self.lacks = False

    def _first(self, group: GroupBlocks) -> int:
        return self._local_tokens // group.tokens

    def _find(self, group: GroupBlocks) -> None:
        if self._limit <= self._local_tokens:
            return
        keys = group.keys[self._first(group) : group.until(self._limit)]
        (self._find_prefix if group.window is None else self._find_scattered)(group, keys)

    def _find_prefix(self, group: GroupBlocks, keys: Sequence[bytes]) -> None:
        """vLLM looks these blocks up from the first to the first miss."""
        found = self._blocks.find_prefix(keys)
        self._prefixes[group.number] = keys[: len(found)], found
        self._answers.update(zip(keys, found, strict=False))
        self.lacks = self.lacks or LookupResult.HIT_PENDING in found
        end = self._first(group) + len(found)
        if end < len(group.keys):
            self._answers[group.keys[end]] = LookupResult.MISS

    def _find_scattered(self, group: GroupBlocks, keys: Sequence[bytes]) -> None:
        """vLLM looks these blocks up from the last on, until it has found a window."""
        for key, result in zip(keys, self._blocks.find(keys), strict=True):
            # It must be known which of these vLLM has found, if some are to be fetched.
            (self._answers if result is LookupResult.MISS else self._windows)[key] = result
