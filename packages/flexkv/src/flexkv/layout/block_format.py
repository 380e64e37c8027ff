# SPDX-License-Identifier: Apache-2.0
"""The format of FlexKV's blocks in their slots, and the fingerprint of equal formats."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexkv.layout.kv_layout import SHARD_ALIGNMENT, KVLayout
from flexkv.types.errors import LayoutError

FORMAT_VERSION = 2
"""Version of the block format below; part of every fingerprint."""

SLOT_ALIGNMENT = 4096
"""Slots start at multiples of this many bytes, as O_DIRECT requires."""

USUAL_BLOCK = 2 << 20
"""Bytes that a block has at least, unless `block_tokens` or a small model makes it smaller."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which part of a block each rank holds: `ranks / replicas` parts, each of them held by
    `replicas` ranks in a row.

    `heads` are the KV heads of a block over all parts; None if parts are not made of heads."""

    ranks: int
    heads: int | None = None
    replicas: int = 1

    @property
    def parts(self) -> int:
        """The number of different parts of a block."""
        return self.ranks // self.replicas

    @classmethod
    def by_head(cls, heads: int, ranks: int) -> Sharding | None:
        """The sharding of `heads` KV heads over `ranks` ranks, as engines do it: equally many heads
        to each rank, or each head to equally many ranks. None if the numbers do not divide evenly.
        """
        if heads % ranks == 0:
            return cls(ranks, heads)
        if ranks % heads == 0:
            return cls(ranks, heads, ranks // heads)
        return None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How FlexKV's blocks lie in their slots.

    A slot holds all KV heads, one after another, so that the heads of a rank are one range of
    bytes however many ranks there are. With pipeline parallelism it holds the heads of the first
    stage's layers, then those of the next. A head holds `engine_blocks` engine blocks, each as its
    pages in all layers. If heads cannot be divided, each rank's bytes count as one head.

    `shard_bytes` are those of each part of a block, which `replicas` ranks in a row hold."""

    engine_blocks: int
    shard_bytes: tuple[int, ...]
    replicas: int = 1
    shard_offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where each part starts within the slot, in bytes."""
    slot_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes from one slot to the next."""

    def __post_init__(self) -> None:
        offsets, end = [], 0
        for size in self.shard_bytes:
            offsets.append(end)
            end += -(-size // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
        last = offsets[-1] + self.shard_bytes[-1]
        object.__setattr__(self, "shard_offsets", tuple(offsets))
        object.__setattr__(self, "slot_bytes", -(-last // SLOT_ALIGNMENT) * SLOT_ALIGNMENT)

    @property
    def ranks(self) -> int:
        """The number of ranks that hold a block, replicas included."""
        return len(self.shard_bytes) * self.replicas


def choose_engine_blocks(
    engine_block_tokens: int, engine_block_bytes: int, block_tokens: int | None
) -> int:
    """Choose the number of engine blocks, with bytes over all layers and parts, in a FlexKV block.

    Without `block_tokens`, chooses as the help text of that setting says. From `USUAL_BLOCK` on,
    larger I/O is hardly faster on NVMe. 128 tokens bound the uncached end of a prompt: with 256, a
    prompt of 1,000 tokens of which the engine had 896 took 40 ms instead of 24 ms on 2 cores.
    Raises LayoutError if `block_tokens` is not a multiple of the engine's block size."""
    if block_tokens is not None:
        if block_tokens % engine_block_tokens:
            raise LayoutError(
                f"block_tokens is {block_tokens}, but the engine's blocks have "
                f"{engine_block_tokens} tokens; allowed: a multiple of {engine_block_tokens}"
            )
        return block_tokens // engine_block_tokens
    wanted = -(-USUAL_BLOCK // engine_block_bytes)
    return max(1, min(wanted, 128 // engine_block_tokens))


def block_identity(
    model: Sequence[str],
    layout: KVLayout,
    engine_blocks: int,
    sharding: Sharding,
    apart: Sequence[KVLayout] = (),
) -> list[str]:
    """All that interchangeable blocks have in common, for people to read: the parts of their
    fingerprint, each `NAME: VALUE`.

    Args:
        model: everything that determines the bytes of a block apart from its key: model, revision,
            dtype, hash scheme and the like, in a fixed order.
        layout: one rank's layout; its geometry counts, its addresses do not.
        sharding: by head, the number of ranks is left out, because their blocks are equal.
        apart: layouts of pages that have slots of their own.
    """
    if sharding.heads is None:
        kind = f"opaque, {sharding.ranks} ranks"
    else:
        kind = f"{sharding.heads} heads"
    return [
        f"format: {FORMAT_VERSION}",
        *model,
        f"engine blocks: {engine_blocks}",
        f"shared by: {kind}",
        f"geometry: {_geometry(layout)}",
        *(f"geometry {number}: {_geometry(each)}" for number, each in enumerate(apart, 1)),
    ]


def _geometry(layout: KVLayout) -> str:
    geometry = [" ".join(map(str, extents)) for extents in layout.geometry]
    return f"{_digest(geometry)} of {len(geometry)} planes, the first {geometry[0]}"


def fingerprint(identity: Sequence[str]) -> str:
    """Name of all blocks with these parts, as `block_identity` returns them; 32 hex digits."""
    return _digest(identity)


def join_stages(fingerprints: Sequence[str]) -> str:
    """Name of blocks whose layers are divided over the stages of a pipeline, from the fingerprints
    of the stages in their order. With one stage, the name of that stage."""
    return fingerprints[0] if len(fingerprints) == 1 else _digest(["stages", *fingerprints])


def _digest(parts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
