# SPDX-License-Identifier: Apache-2.0
"""Requests, blocks and bytes of a toy engine."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexkv import KVLayout, TensorView
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.worker.pages import RankPages
from flexkv.layout import Sharding

BLOCK, BYTES = 4, 32
"""Tokens of a block, bytes of a token."""

GROUPS = Groups((Group(0, Reach.ALL, 0, BLOCK, 1),), BLOCK)
"""One group of full attention."""


def digests(tokens: Iterable[int], start: bytes) -> Iterator[bytes]:
    """A digest of `start` and all tokens up to each."""
    state = hashlib.blake2b(start, digest_size=BYTES)
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        yield state.copy().digest()


@dataclass(eq=False)
class ToyRequest:
    """An `EngineRequest`.

    Attributes:
        tokens: of the prompt and of the answer so far.
        loaded: tokens that were loaded for it, or should have been.
        after_load: tokens whose KV the engine has once its load has ended.
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    num_prompt_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    loaded: int = 0
    preemptions: int = 0
    after_load: int = 0
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash_blocks(self) -> None:
        hashes = list(digests(self.tokens, (self.cache_salt or "").encode()))
        self.block_hashes = hashes[BLOCK - 1 :: BLOCK]

    def lacks(self, count: int) -> int:
        """Blocks that it needs to compute `count` more tokens."""
        return -(-(self.num_computed_tokens + count) // BLOCK) - len(self.table)

    def recompute(self, bad: Collection[int]) -> None:
        """Compute its tokens again from the first of these blocks on."""
        good = next((i for i, block in enumerate(self.table) if block in bad), len(self.table))
        self.num_computed_tokens = min(self.num_computed_tokens, good * BLOCK)
        self.after_load = min(self.after_load, good * BLOCK)

    def sample(self) -> bool:
        """Add the next token, which follows from all before it. Whether it was the last."""
        *_, last = digests(self.tokens, b"token")
        self.tokens.append(last[0])
        self.hash_blocks()
        return len(self.tokens) - self.num_prompt_tokens >= self.max_tokens


class ToyPool:
    """An `EnginePool`: blocks from 1 on; free ones keep their bytes until they are taken."""

    def __init__(self, blocks: int) -> None:
        self.found: dict[bytes, int] = {}
        self.free = dict.fromkeys(range(1, blocks))
        self._users = [0] * blocks
        self._old: object = None

    def has(self, block_hash: bytes, group: int) -> bool:
        return block_hash in self.found

    def forget(self, engine_blocks: set[int]) -> None:
        gone = [each for each, block in self.found.items() if block in engine_blocks]
        for block_hash in gone:
            del self.found[block_hash]

    def weights_changed(self, in_use: bool) -> None:
        self._old = self.found if in_use or self.found else None

    @property
    def may_find_old_blocks(self) -> bool:
        return self._old is self.found

    def hits(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix that is here."""
        count = next((i for i, each in enumerate(hashes) if each not in self.found), len(hashes))
        return [self.found[each] for each in hashes[:count]]

    def take(self, hits: Sequence[int], count: int) -> list[int] | None:
        """`hits` and `count` other blocks; None if there are too few."""
        others = [block for block in self.free if block not in hits][: max(0, count)]
        if len(others) < count:
            return None
        self.forget(set(others))
        for block in (*hits, *others):
            self._users[block] += 1
            self.free.pop(block, None)
        return [*hits, *others]

    def release(self, table: list[int]) -> None:
        """The request of this table needs its blocks no more."""
        for block in reversed(table):
            self._users[block] -= 1
            if not self._users[block]:
                self.free[block] = None
        table.clear()

    def register(self, request: ToyRequest) -> None:
        """Others may find the full blocks of a request."""
        full = request.block_hashes[: request.num_computed_tokens // BLOCK]
        for block_hash, block in zip(full, request.table, strict=False):
            self.found.setdefault(block_hash, block)


class ToyPages:
    """The bytes of the blocks. Those of a token are a digest of the weights and all tokens up to
    it."""

    def __init__(self, blocks: int) -> None:
        self.tensor = np.zeros((blocks, BLOCK, BYTES), np.uint8)
        self.weights = b""
        self.checked = 0

    def of_rank(self) -> RankPages:
        """All of the pages, which one rank has."""
        view = TensorView.of("layer", self.tensor, page_dim=0)
        layout = KVLayout.from_tensors([view], len(self.tensor))
        return RankPages(layout, 1, Sharding(1))

    def compute(self, request: ToyRequest, count: int) -> int:
        """Compute `count` tokens on those before. Returns the first block of these with wrong
        bytes, 0 if there is none. What is computed on wrong bytes is wrong."""
        start, stop = request.num_computed_tokens, request.num_computed_tokens + count
        joined = b"".join(digests(request.tokens[:stop], b"bytes" + self.weights))
        expected = np.frombuffer(joined, np.uint8).reshape(-1, BYTES)
        blocks, places = np.array(request.table)[np.arange(stop) // BLOCK], np.arange(stop) % BLOCK
        differs = (self.tensor[blocks[:start], places[:start]] != expected[:start]).any(axis=1)
        is_wrong = bool(differs.any())
        self.tensor[blocks[start:], places[start:]] = expected[start:] ^ (0xFF if is_wrong else 0)
        request.num_computed_tokens = stop
        self.checked += start
        return int(blocks[differs.argmax()]) if is_wrong else 0
