# SPDX-License-Identifier: Apache-2.0
"""The KV of the engine without a model: what a token's bytes are, and the pages that hold them."""

from __future__ import annotations

import functools
import hashlib

import torch

BLOCK_TOKENS = 16
LAYERS = 2
HEADS = 4
HEAD_BYTES = 16
"""Of a token, head and layer."""


def heads_of(rank: int, ranks: int) -> slice:
    """The heads that a rank holds; with more ranks than heads several hold the same one."""
    first = rank * HEADS // ranks
    return slice(first, first + max(1, HEADS // ranks))


def token_bytes(tokens: list[int], weights: bytes) -> torch.Tensor:
    """KV that `weights` make of `tokens`: int8 of shape [layers, tokens, HEADS, HEAD_BYTES]."""
    rows = bytearray(_digests(tuple(tokens), weights)[1])
    flat = torch.frombuffer(rows, dtype=torch.int8) if rows else torch.empty(0, dtype=torch.int8)
    half = flat.view(len(tokens), LAYERS, HEADS, HEAD_BYTES // 2).transpose(0, 1)
    return torch.cat((half, ~half), dim=3)


@functools.lru_cache(maxsize=512)
def _digests(tokens: tuple[int, ...], weights: bytes) -> tuple[hashlib.blake2b, bytes]:
    """The state after `tokens`, and the digests after each of them. A step of the engine begins at
    those of the step before."""
    if not tokens:
        return hashlib.blake2b(weights, digest_size=LAYERS * HEADS * HEAD_BYTES // 2), b""
    known = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    before, rows = _digests(tokens[:known], weights)
    state, more = before.copy(), bytearray()
    for token in tokens[known:]:
        state.update(token.to_bytes(4, "little", signed=True))
        more += state.digest()
    return state, rows + more


def make_pages(num_blocks: int, ranks: int = 1, groups: int = 1) -> dict[str, torch.Tensor]:
    """Two layers in one allocation, (block, head, token, content) each, a token's heads side by
    side in memory, strided as vLLM's own views are; poisoned. The layers of further groups lie in
    the same memory: a block belongs to one group at a time."""
    shape = (LAYERS, num_blocks, BLOCK_TOKENS, max(1, HEADS // ranks), HEAD_BYTES)
    raw = torch.full(shape, 0x55, dtype=torch.int8).transpose(2, 3)
    return {f"layer{i}": raw[i % LAYERS] for i in range(LAYERS * groups)}
