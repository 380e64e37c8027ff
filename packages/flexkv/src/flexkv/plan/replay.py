# SPDX-License-Identifier: Apache-2.0
"""Replays a trace over FlexKV's own index, policies, admissions and fetches.

Requests run one after another, and copies take no time. The result says which blocks a cache of a
size keeps, not how fast it is. No bytes are copied or written.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from flexkv.eviction import POLICIES, LRUPolicy, RequestContext
from flexkv.figures.meter import Meter
from flexkv.index.block_index import block_index
from flexkv.index.slot_index import slot_index
from flexkv.plan.saving import Savings
from flexkv.plan.trace import Trace, TracedRequest
from flexkv.tiers.base import AttachedTier, BlockResult, TierFigures, Traffic
from flexkv.tiers.disk.table import CHECKSUM_BYTES
from flexkv.tiers.job import Outcome as JobOutcome
from flexkv.tiers.job import Priority, Urgency
from flexkv.transfer.stack import TierStack
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Medium

_KEY_BYTES = 8
_NO_BYTES = memoryview(b"")
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


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
            own, _ = engine.run(prompt, chain, context, request, most=most, own=0)
        hits, disk = cache.run(prompt, chain, context, request, most=most, own=own)
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
        0 if cache.disk is None else cache.disk.written,
        0 if cache.disk is None else cache.disk.refused,
    )


class _Cache:
    """Host memory and perhaps a disk, for requests that run one after another."""

    def __init__(self, setup: Setup, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._index = block_index(setup.memory_blocks, POLICIES[setup.policy](setup.memory_blocks))
        self.disk: _Disk | None = None
        self._below: TierStack | None = None
        if setup.disk_blocks:
            self.disk = _Disk(setup)
            tier = AttachedTier(self.disk, ADMISSIONS[setup.admission])
            self._below = TierStack(self._index, lambda slot: _NO_BYTES, [tier], Meter())

    def run(
        self,
        prompt: Sequence[bytes],
        chain: Sequence[bytes],
        context: RequestContext,
        request: TracedRequest,
        *,
        most: int,
        own: int,
    ) -> tuple[int, int]:
        """Replay one request from lookup to end, by the keys of the blocks of its prompt, and of
        its prompt and answer. `context` is what the policy knows of it, without the hit. A hit can
        save `most` blocks of the prompt, of which the engine's own cache has the first `own`.
        Returns the number of blocks that were loaded, and how many of them came from disk."""
        index = self._index
        if self.disk is not None:
            self.disk.now = request.seconds
        wanted = prompt[own:most]
        in_memory = index.lookup(wanted)
        hits = max(in_memory, self._fetch(wanted))
        found = prompt[: own + hits]
        known = replace(context, hit_tokens=len(found) * self._block_tokens)
        index.began(prompt, known, request.seconds)
        if self.disk is not None:
            self.disk.began(prompt, known, request.seconds)
        self._use(found, known)
        if self._below is None:
            index.publish(index.reserve_all(chain, range(len(chain)), (0,)))
        else:
            there = index.present(chain)
            blocks = self._below.reserve(chain, [i for i, has in enumerate(there) if not has], (0,))
            index.publish(blocks)
            self._below.stored(blocks.keys, True)
        self._use(chain, None)
        index.ended(context.request_id, request.output_tokens, request.seconds)
        if self.disk is not None:
            self.disk.ended(context.request_id, request.output_tokens, request.seconds)
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


class _Disk:
    """An `IndexedTier` without bytes: it has the index of a real one, and each read and write ends
    at once. Buffers are neither read nor written. The caller sets the time `now` in seconds. In any
    `write_seconds` it takes at most `write_blocks`, and counts those beyond as `refused`."""

    medium = Medium.DISK

    def __init__(self, setup: Setup) -> None:
        self._policy = POLICIES[setup.policy](setup.disk_blocks)
        self._index = slot_index(setup.disk_blocks, self._policy)
        self._tickets = itertools.count(1)
        self._results: list[BlockResult] = []
        self._most, self._seconds = setup.write_blocks, setup.write_seconds
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_blocks = 0
        self.now = 0.0
        self.written = self.refused = 0

    @property
    def figures(self) -> TierFigures:
        index = self._index
        return TierFigures(
            len(index), index.num_slots, self.written, index.evictions, 0, 0, {}, {}, 0, Traffic()
        )

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        return self._index.present(keys)

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        if not isinstance(self._policy, LRUPolicy):
            self._policy.began(keys, context, now)

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        if not isinstance(self._policy, LRUPolicy):
            self._policy.ended(request_id, output_tokens, now)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._index.touch(keys)

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        priority: Priority,
        turn: int = 0,
    ) -> int:
        ticket = next(self._tickets)
        for position, has in enumerate(self._index.present(keys)):
            outcome = JobOutcome.DONE if has else JobOutcome.MISSING
            self._results.append(BlockResult(ticket, position, outcome))
        return ticket

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        ticket = next(self._tickets)
        index = self._index
        fresh = [key for key, has in zip(keys, index.has_all(keys), strict=True) if not has]
        allowed = self._allow(len(fresh))
        # As in a disk tier, a prefix counts as used from its end to its beginning.
        after = after or [None] * len(keys)
        before = dict(zip(keys, after, strict=True))
        slots: list[int] = []
        for key in fresh[:allowed]:
            slot = index.reserve(key, before[key], slots[-1] if slots else None)
            if slot is None:
                break
            slots.append(slot)
        dropped = set(fresh[len(slots) :])
        for position, key in enumerate(keys):
            outcome = JobOutcome.DROPPED if key in dropped else JobOutcome.DONE
            self._results.append(BlockResult(ticket, position, outcome))
        for slot in slots:
            index.publish(slot, _NO_CHECKSUM)
        self.written += len(slots)
        return ticket

    def _allow(self, wanted: int) -> int:
        """How many of so many blocks may be written now."""
        if self._most is None:
            return wanted
        while self._recent and self._recent[0][0] < self.now - self._seconds:
            self._recent_blocks -= self._recent.popleft()[1]
        taken = max(0, min(wanted, self._most - self._recent_blocks))
        if taken:
            self._recent.append((self.now, taken))
            self._recent_blocks += taken
        self.refused += wanted - taken
        return taken

    def poll(self) -> list[BlockResult]:
        results, self._results = self._results, []
        return results

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Nothing waits, and no trace removes or describes a block."""

    cancel = raise_priority = begin_close = describe = _ignore
    clear = empty = remove = remove_old = watch = _ignore

    def hung(self, ticket: int) -> Collection[int]:
        return ()

    def sync(self) -> list[Future[str]]:
        return []

    @property
    def has_news(self) -> bool:
        return False

    @property
    def has_changes(self) -> bool:
        return False

    def drain_changes(self, limit: int) -> dict[bytes, bool]:
        return {}

    def listed(self) -> Iterator[list[bytes]]:
        yield [key for key in map(self._index.key_of, range(self._index.num_slots)) if key]

    def take_descriptions(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return {}

    def drain(self) -> bool:
        self._results.clear()
        return True

    def close(self, flush_seconds: float = 0.0) -> bool:
        return True
