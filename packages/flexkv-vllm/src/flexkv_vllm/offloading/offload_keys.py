# SPDX-License-Identifier: Apache-2.0
"""The keys that vLLM's offloading connector has for the blocks of a prompt that is no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.base import make_offload_key

from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv_vllm.prompt_keys import VllmPromptKeys


@dataclass(frozen=True, slots=True)
class OffloadKeys:
    """See `KeysOfHashes`."""

    hash_tokens: int

    def of_hashes(self, hashes: Sequence[bytes], group: Group) -> Sequence[bytes]:
        """See `KeysOfHashes.of_hashes`."""
        step = group.block_tokens // self.hash_tokens
        return [make_offload_key(each, group.index) for each in hashes[step - 1 :: step]]


class OffloadedPromptKeys(VllmPromptKeys):
    """The arguments are those of `ConnectorCalls.bound`; at least one group."""

    def __init__(
        self, algorithm: str, hash_tokens: int, groups: Sequence[tuple[int, int, int | None]]
    ) -> None:
        members = tuple(_group(*each) for each in groups)
        super().__init__(algorithm, Groups(members, hash_tokens), OffloadKeys(hash_tokens))


def _group(number: int, tokens: int, window: int | None) -> Group:
    if window is None:
        return Group(number, Reach.ALL, 0, tokens, 1)
    # Behind a hit of whole blocks, it needs these blocks and no token more.
    return Group(number, Reach.WINDOW, window * tokens + 1, tokens, 1)
