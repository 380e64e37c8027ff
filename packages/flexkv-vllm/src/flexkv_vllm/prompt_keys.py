# SPDX-License-Identifier: Apache-2.0
"""The keys of a prompt that is no request, for operators that ask where its blocks are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from flexkv.control.prompts import PromptQuestion
from flexkv.engine.engine_door import PART_BLOCKS
from flexkv.engine.scheduler.groups import Groups
from flexkv.engine.scheduler.keys import BlockKeys


class VllmPromptKeys:
    """See `flexkv.engine.engine_door.PromptKeys`. The keys are those of the group that reaches
    furthest back; of others, a hit needs the last blocks only.

    Args:
        algorithm: name of vLLM's hash function.
        groups: of its model.
        keys: makes the keys of its requests.

    Attributes:
        block_tokens: tokens of a block.
    """

    def __init__(self, algorithm: str, groups: Groups, keys: BlockKeys) -> None:
        self._group = groups.furthest
        self._keys = keys
        self._hash = get_hash_fn_by_name(algorithm)
        self.block_tokens = self._group.block_tokens

    def count(self, question: PromptQuestion) -> int:
        """See `PromptKeys.count`."""
        tokens = len(question.tokens) or len(question.hashes) * self._keys.hash_tokens
        return tokens // self.block_tokens

    def parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        """See `PromptKeys.parts`."""
        step = self.block_tokens // self._keys.hash_tokens
        if question.hashes:
            size = PART_BLOCKS * step
            for start in range(0, len(question.hashes), size):
                part = question.hashes[start : start + size]
                yield self._keys.of_hashes([bytes.fromhex(each) for each in part], self._group)
            return
        # vLLM hashes the tokens of a request as they come.
        size = max(1, PART_BLOCKS // step) * self.block_tokens
        request, done = self._request(question, size), 0
        for start in range(size, len(question.tokens) + size, size):
            hashes = request.block_hashes
            whole = len(hashes) // step * step
            yield self._keys.of_hashes(hashes[done:whole], self._group)
            done = whole
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
