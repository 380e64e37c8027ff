# SPDX-License-Identifier: Apache-2.0
"""What the cache calls the blocks of a request: vLLM's own hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexkv_vllm.groups import Group, Groups
from flexkv_vllm.identity import adapter_stamp

if TYPE_CHECKING:
    from vllm.v1.request import Request


class BlockKeys:
    """Keys of blocks.

    A key is the hash of the block's last token range, which covers the whole prefix up to there;
    with several groups, then the number of the group; then the stamp of a LoRA adapter.

    Args:
        groups: of the model.

    Attributes:
        are_hashes: whether they are vLLM's hashes and nothing more, but for adapters.
        hash_tokens: tokens that one of vLLM's block hashes stands for.
    """

    def __init__(self, groups: Groups) -> None:
        self.are_hashes = groups.plain
        self.hash_tokens = groups.hash_tokens

    def of(
        self, request: Request, group: Group, start: int = 0, stop: int | None = None
    ) -> Sequence[bytes]:
        """Keys of FlexKV blocks `start` to `stop` of a request in a group, as far as vLLM has
        hashed its tokens."""
        step = group.block_tokens // self.hash_tokens
        end = None if stop is None else stop * step
        hashes: Sequence[bytes] = request.block_hashes[(start + 1) * step - 1 : end : step]
        ending = b"" if self.are_hashes else bytes([group.index])
        if request.lora_request is not None:
            ending += adapter_stamp(request.lora_request)
        return [key + ending for key in hashes] if ending else hashes
