# SPDX-License-Identifier: Apache-2.0
"""The keys of a prompt's blocks: vLLM's hash of the tokens up to each block's end, and the stamp of
the LoRA adapter, whose weights the hash does not contain."""

from __future__ import annotations

import functools
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from flexkv.engine.scheduler.groups import Groups
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.weights import adapter_stamps, digest
from flexkv.operators.engine_door import PART_BLOCKS
from flexkv.operators.verbs import PromptQuestion

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_loads: Counter[tuple[str, str]] = Counter()
"""Loads of LoRA adapters after the first, by name and path."""


@functools.lru_cache(maxsize=1024)
def _stamp(name: str, path: str, load: int) -> bytes:
    """The stamp of an adapter's files as they are at the first call for a load."""
    # Without local files, FlexKV cannot know whether the next process has the same weights.
    known = adapter_stamps(Path(path)) or [secrets.token_hex()]
    return bytes.fromhex(digest([name, path, *known]))


def adapter_stamp(adapter: LoRARequest) -> bytes:
    """16 bytes to append to a key, which distinguish adapters of the same name and path.

    vLLM's hashes contain only name and path. After a restart, they may stand for other weights.
    """
    name, path = adapter.lora_name, adapter.lora_path
    return _stamp(name, path, _loads[name, path])


def adapter_loaded(adapter: LoRARequest) -> bool:
    """Note that vLLM has loaded an adapter, perhaps in place of another one of its name and path.
    Returns whether it may have other weights than before. vLLM's hashes do not show that. Raises
    OSError if a file cannot be examined."""
    before = adapter_stamp(adapter)
    if Path(adapter.lora_path).exists() or getattr(adapter, "load_inplace", False):
        _loads[adapter.lora_name, adapter.lora_path] += 1
    return adapter_stamp(adapter) != before


def request_stamp(request: Request) -> bytes:
    """The stamp of the request's LoRA adapter; empty if it has none."""
    adapter = request.lora_request
    return b"" if adapter is None else adapter_stamp(adapter)


def block_keys(groups: Groups) -> BlockKeys:
    """What makes the keys of requests' blocks."""
    return BlockKeys(groups, request_stamp)


class VllmPromptKeys:
    """The keys of a prompt that is no request, for operators that ask where its blocks are; see
    `flexkv.operators.engine_door.PromptKeys`. The blocks of a prompt are those of the group that
    reaches furthest back; of others, a hit needs the last blocks only.

    Args:
        algorithm: name of vLLM's hash function.
        keys: makes the keys of its requests.
    """

    def __init__(self, algorithm: str, groups: Groups, keys: BlockKeys) -> None:
        self._groups = groups
        self._keys = keys
        self._hash = get_hash_fn_by_name(algorithm)
        self.block_tokens = groups.furthest.block_tokens

    def count(self, question: PromptQuestion) -> int:
        """See `PromptKeys.count`."""
        tokens = len(question.tokens) or len(question.hashes) * self._keys.hash_tokens
        return tokens // self.block_tokens

    def parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        """See `PromptKeys.parts`."""
        for hashes in self._hashes(question):
            yield self._keys.of_hashes(hashes, self._groups.furthest)

    def others(
        self, question: PromptQuestion, blocks: int | None = None
    ) -> Iterator[Sequence[bytes]]:
        """See `PromptKeys.others`. A request whose prompt ends with the hit computes its last
        token, so its own hit may be shorter by what all groups have in common."""
        others = [each for each in self._groups.members if each is not self._groups.furthest]
        if not others:
            return
        unit = self._groups.alignment
        hit = None if blocks is None else blocks * self.block_tokens // unit * unit
        start = 0  # tokens before the part
        for hashes in self._hashes(question):
            if hit is not None and start >= hit:
                return
            for group in others:
                keys = self._keys.of_hashes(hashes, group)
                if hit is not None:
                    before = start // group.block_tokens
                    first = group.first_needed(max(0, hit - unit)) - before
                    keys = keys[max(0, first) : max(0, hit // group.block_tokens - before)]
                if keys:
                    yield keys
            start += len(hashes) * self._keys.hash_tokens

    def _hashes(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        """vLLM's hashes of a prompt, about `PART_BLOCKS` at a time. Each part begins with a block
        of every group."""
        unit = self._groups.alignment
        size = max(1, PART_BLOCKS * self._keys.hash_tokens // unit) * unit
        if question.hashes:
            count = size // self._keys.hash_tokens
            for start in range(0, len(question.hashes), count):
                yield [bytes.fromhex(each) for each in question.hashes[start : start + count]]
            return
        # vLLM hashes the tokens of a request as they come.
        request, done = self._request(question, size), 0
        for start in range(size, len(question.tokens) + size, size):
            hashes: Sequence[bytes] = request.block_hashes
            yield hashes[done:]
            done = len(hashes)
            request.append_output_token_ids(list(question.tokens[start : start + size]))

    def _request(self, question: PromptQuestion, tokens: int) -> Request:
        """A request with the first tokens of a prompt."""
        return Request(
            request_id="flexkv lookup",
            prompt_token_ids=list(question.tokens[:tokens]),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=question.cache_salt or None,
            block_hasher=get_request_block_hasher(self._keys.hash_tokens, self._hash),
        )
