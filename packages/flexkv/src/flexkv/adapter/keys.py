# SPDX-License-Identifier: Apache-2.0
"""What the cache calls the blocks of a request: the engine's own hashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flexkv.adapter.engine import EngineRequest
from flexkv.adapter.groups import Group, Groups


class BlockKeys:
    """Keys of blocks.

    A key is the hash of the block's last token range, which covers the whole prefix up to there;
    with several groups, then the number of the group; then the stamp of the request.

    Args:
        groups: of the model.
        stamp: what else tells blocks of a request from others of the same hash; empty if nothing.

    Attributes:
        are_hashes: whether they are the engine's hashes and nothing more, except for stamps.
        hash_tokens: tokens that one of the engine's block hashes stands for.
    """

    def __init__(self, groups: Groups, stamp: Callable[[Any], bytes]) -> None:
        self._stamp = stamp
        self.are_hashes = groups.plain
        self.hash_tokens = groups.hash_tokens

    def of(
        self, request: EngineRequest, group: Group, start: int = 0, stop: int | None = None
    ) -> Sequence[bytes]:
        """Keys of FlexKV blocks `start` to `stop` of a request in a group, as far as the engine has
        hashed its tokens."""
        step = group.block_tokens // self.hash_tokens
        end = None if stop is None else stop * step
        hashes: Sequence[bytes] = request.block_hashes[(start + 1) * step - 1 : end : step]
        ending = b"" if self.are_hashes else bytes([group.index])
        ending += self._stamp(request)
        return [key + ending for key in hashes] if ending else hashes
