# SPDX-License-Identifier: Apache-2.0
"""Replays a trace over FlexKV's own index, policies, admissions and fetches.

Requests run one after another, and copies take no time. The result says which blocks a cache of a
size keeps, not how fast it is. No bytes are copied or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexkv.eviction import POLICIES, RequestContext
from flexkv.figures.meter import Meter
from flexkv.index.block_index import block_index
from flexkv.plan.model_tier import ModelTier, WriteBudget
from flexkv.plan.saving import Savings
from flexkv.plan.trace import Trace, TracedRequest
from flexkv.tiers.base import AttachedTier
from flexkv.tiers.job import Priority, Urgency
from flexkv.transfer.stack import TierStack
from flexkv.types.admission import ADMISSIONS

_KEY_BYTES = 8
_NO_BYTES = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Setup:
    """A cache to replay a trace on."""

    memory_blocks: int
    policy: str = "lru"
    """Of host memory and of the disk."""
    disk_blocks: int = 0
    """0 for no disk."""
    admission: str = "write_through"
    """Of the disk."""
    engine_blocks: int = 0
    """Blocks that the engine's own LRU cache holds. Its hits do not count."""
    write_blocks: int | None = None
    """The most blocks to write to disk in any `write_seconds`; None for no limit."""
    write_seconds: float = 86400.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a cache on a trace. Those of a sample are estimates for the whole trace."""

    setup: Setup
    hit_tokens: int
    """Prompt tokens that were loaded from host memory or disk."""
    disk_tokens: int
    """Those of them that were loaded from disk."""
    hit_rate: float
    """`hit_tokens` as a share of all prompt tokens."""
    saved_seconds: float | None
    """None if the cost is unknown."""
    written_blocks: int
    """Blocks written to disk."""
    refused_blocks: int = 0
    """Blocks not written, because of `Setup.write_blocks`."""
    share: float = 1.0
    """Prompt tokens that were replayed as a share of all."""


def replay(trace: Trace, setup: Setup, savings: Savings | None = None) -> Outcome:
    """Replay all requests of `trace` on the cache that `setup` describes, which begins empty."""
    size = trace.block_tokens
    cache = _Cache(setup, size)
    engine = _Cache(Setup(setup.engine_blocks), size) if setup.engine_blocks else None
    keys = [number.to_bytes(_KEY_BYTES, "little") for number in range(trace.distinct_blocks)]
    hit_tokens, disk_tokens, saved = 0, 0, 0.0
    for number, request in enumerate(trace.requests):
        prompt = [keys[block] for block in request.blocks]
        chain = prompt + [keys[block] for block in request.answer]
        most = min(len(prompt), max(0, request.prompt_tokens - 1) // size)
        context = RequestContext(
            request.prompt_tokens, request_id=str(number), session=request.session
        )
        own = 0
        if engine is not None:
            own, _ = engine.run(_Prefix(prompt, chain, most, 0), context, request)
        hits, disk = cache.run(_Prefix(prompt, chain, most, own), context, request)
        hit_tokens += hits * size
        disk_tokens += disk * size
        if savings is not None:
            saved += savings.of_hit(own, own + hits, disk)
    return Outcome(
        setup,
        hit_tokens,
        disk_tokens,
        hit_tokens / trace.prompt_tokens if trace.prompt_tokens else 0.0,
        saved if savings is not None else None,
        cache.written_blocks,
        cache.refused_blocks,
    )


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The keys of a request's blocks."""

    prompt: Sequence[bytes]
    chain: Sequence[bytes]
    """Those of the prompt and of the answer."""
    most: int
    """How many blocks of the prompt a hit can save."""
    own: int
    """How many blocks, from the first on, the engine's own cache has."""


class _Cache:
    """Host memory and perhaps a disk, for requests that run one after another."""

    def __init__(self, setup: Setup, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._index = block_index(setup.memory_blocks, POLICIES[setup.policy](setup.memory_blocks))
        self._budget: WriteBudget | None = None
        if setup.write_blocks is not None:
            self._budget = WriteBudget(setup.write_blocks, setup.write_seconds)
        self._disk: ModelTier | None = None
        if setup.disk_blocks:
            self._disk = ModelTier(setup.disk_blocks, setup.policy, self._budget)
        self._below: TierStack | None = None
        if self._disk is not None:
            tier = AttachedTier(self._disk, ADMISSIONS[setup.admission])
            self._below = TierStack(self._index, lambda slot: _NO_BYTES, [tier], Meter())

    @property
    def written_blocks(self) -> int:
        return 0 if self._disk is None else self._disk.figures.written_blocks

    @property
    def refused_blocks(self) -> int:
        return 0 if self._budget is None else self._budget.refused

    def run(
        self, prefix: _Prefix, context: RequestContext, request: TracedRequest
    ) -> tuple[int, int]:
        """Replay one request from lookup to end. `context` is what the policy knows of it, without
        the hit. Returns the number of blocks that were loaded, and how many of them came from disk.
        """
        index = self._index
        if self._budget is not None:
            self._budget.now = request.seconds
        wanted = prefix.prompt[prefix.own : prefix.most]
        in_memory = index.lookup(wanted)
        hits = max(in_memory, self._fetch(wanted))
        found = prefix.prompt[: prefix.own + hits]
        known = replace(context, hit_tokens=len(found) * self._block_tokens)
        index.began(prefix.prompt, known, request.seconds)
        if self._disk is not None:
            self._disk.began(prefix.prompt, known, request.seconds)
        self._use(found, known)
        chain = prefix.chain
        if self._below is None:
            index.publish(index.reserve_all(chain, range(len(chain)), (0,)))
        else:
            there = index.present(chain)
            blocks = self._below.reserve(chain, [i for i, has in enumerate(there) if not has], (0,))
            index.publish(blocks)
            self._below.stored(blocks.keys, True)
        self._use(prefix.chain, None)
        index.ended(context.request_id, request.output_tokens, request.seconds)
        if self._disk is not None:
            self._disk.ended(context.request_id, request.output_tokens, request.seconds)
        return hits, hits - in_memory

    def _fetch(self, keys: Sequence[bytes]) -> int:
        """Fetch blocks of a prefix from disk. Returns how many blocks of the prefix are then in
        memory; 0 if the disk had none to add."""
        if self._below is None:
            return 0
        fetch = self._below.fetcher.begin(keys, Urgency(Priority.LOAD))
        if fetch is None:
            return 0
        while not self._below.fetcher.state(fetch).done:
            self._below.poll()
        return self._below.fetcher.end(fetch).arrived

    def _use(self, keys: Sequence[bytes], hit: RequestContext | None) -> None:
        if self._below is not None:
            self._below.uses.note(keys, hit)
            while self._below.busy:
                self._below.poll()
        elif hit is not None:
            self._index.hit(keys, hit)
        else:
            self._index.touch(keys)
