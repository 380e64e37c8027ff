# SPDX-License-Identifier: Apache-2.0
"""The smallest engine over a `RequestSide`: a pool of pages with a prefix cache, steps, chunked
prefill, preemption, ranks. Each step checks the bytes of all tokens that it computes on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from flexkv import CacheConfig, KVCache, KVLayout, TensorView
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.orders import StepOrders
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.scheduler.scheduled_step import Placed, ScheduledStep
from flexkv.engine.scheduler.side import RequestSide
from flexkv.engine.start import attach_session, make_cache, make_chooser
from flexkv.engine.worker.pages import Device, RankPages
from flexkv.engine.worker.start_worker import start_worker
from flexkv.layout import Sharding
from flexkv.operators.engine_door import OperatorAccess

BLOCK, BYTES = 4, 32
"""Tokens of FlexKV's blocks, bytes of a token on a rank."""


class Shape(NamedTuple):
    """How an engine keeps its KV: tokens of a page, and ranks with bytes of their own."""

    page: int = BLOCK
    ranks: int = 1

    @property
    def groups(self) -> Groups:
        return Groups((Group(0, Reach.ALL, 0, self.page, BLOCK // self.page),), self.page)


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
        table: its pages.
        loaded: tokens that were loaded for it, or should have been.
        after_load: tokens whose KV the engine has once its load has ended.
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    page: int = BLOCK
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    table: list[int] = field(default_factory=list)
    loaded: int = 0
    preemptions: int = 0
    after_load: int = 0
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.hash_pages()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash_pages(self) -> None:
        hashes = list(digests(self.tokens, (self.cache_salt or "").encode()))
        self.block_hashes = hashes[self.page - 1 :: self.page]

    def lacks(self, count: int) -> int:
        """Pages that it needs to compute `count` more tokens."""
        return -(-(self.num_computed_tokens + count) // self.page) - len(self.table)

    def recompute(self, bad: Collection[int]) -> None:
        """Compute its tokens again from the first of these pages on."""
        good = next((i for i, page in enumerate(self.table) if page in bad), len(self.table))
        self.num_computed_tokens = min(self.num_computed_tokens, good * self.page)
        self.after_load = min(self.after_load, good * self.page)

    def sample(self) -> bool:
        """Add the next token, which follows from all before it. Whether it was the last."""
        *_, last = digests(self.tokens, b"token")
        self.tokens.append(last[0])
        self.hash_pages()
        return len(self.tokens) - self.num_prompt_tokens >= self.max_tokens


class ToyPool:
    """An `EnginePool`: pages from 1 on; free ones keep their bytes until they are taken."""

    def __init__(self, pages: int) -> None:
        self.found: dict[bytes, int] = {}
        self.free = dict.fromkeys(range(1, pages))
        self._users: Counter[int] = Counter()
        self._old: object = None

    def has(self, block_hash: bytes, group: int) -> bool:
        return block_hash in self.found

    def forget(self, engine_blocks: set[int]) -> None:
        for block_hash in [each for each, page in self.found.items() if page in engine_blocks]:
            del self.found[block_hash]

    def weights_changed(self, in_use: bool) -> None:
        self._old = self.found if in_use or self.found else None

    @property
    def may_find_old_blocks(self) -> bool:
        return self._old is self.found

    def hits(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix that is here."""
        count = next((i for i, each in enumerate(hashes) if each not in self.found), len(hashes))
        return [self.found[each] for each in hashes[:count]]

    def take(self, hits: Sequence[int], count: int) -> list[int] | None:
        """`hits` and `count` other pages; None if there are too few."""
        others = [page for page in self.free if page not in hits][: max(0, count)]
        if len(others) < count:
            return None
        self.forget(set(others))
        for page in (*hits, *others):
            self._users[page] += 1
            self.free.pop(page, None)
        return [*hits, *others]

    def release(self, table: list[int]) -> None:
        """The request of this table needs its pages no more. The end of a prefix leaves first."""
        for page in reversed(table):
            self._users[page] -= 1
            if not self._users[page]:
                self.free[page] = None
        table.clear()

    def register(self, request: ToyRequest) -> None:
        """Others may find the full pages of a request."""
        full = request.block_hashes[: request.num_computed_tokens // request.page]
        for block_hash, page in zip(full, request.table, strict=False):
            self.found.setdefault(block_hash, page)


class ToyPages:
    """The bytes of the pages on all ranks. Those of a token are a digest of the weights, the rank
    and all tokens up to it."""

    def __init__(self, pages: int, shape: Shape) -> None:
        self.tensors = np.zeros((shape.ranks, pages, shape.page, BYTES), np.uint8)
        self.weights = b""
        self.checked = 0
        self._shape = shape

    def of_rank(self, rank: int) -> RankPages:
        tensor = self.tensors[rank]
        layout = KVLayout.from_tensors([TensorView.of("layer", tensor, page_dim=0)], len(tensor))
        return RankPages(layout, BLOCK // self._shape.page, Sharding(self._shape.ranks), rank)

    def compute(self, request: ToyRequest, count: int) -> int:
        """Compute `count` tokens on those before. Returns the first page of these with wrong bytes,
        0 if there is none. What is computed on wrong bytes is wrong."""
        start, stop = request.num_computed_tokens, request.num_computed_tokens + count
        at = np.array(request.table)[np.arange(stop) // request.page]
        within, wrong = np.arange(stop) % request.page, list[int]()
        for rank, tensor in enumerate(self.tensors):
            salt = b"bytes" + self.weights + bytes([rank])
            joined = b"".join(digests(request.tokens[:stop], salt))
            expected = np.frombuffer(joined, np.uint8).reshape(-1, BYTES)
            differs = (tensor[at[:start], within[:start]] != expected[:start]).any(axis=1)
            wrong += at[:start][differs].tolist()[:1]
            tensor[at[start:], within[start:]] = expected[start:] ^ (0xFF if wrong else 0)
        request.num_computed_tokens = stop
        self.checked += start
        return wrong[0] if wrong else 0


class ToyEngine:
    """Requests go in with `add`; `step` runs a step."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        config: CacheConfig,
        access: OperatorAccess,
        device: Device,
        pages: int,
        mode: LoadMode,
        shape: Shape,
    ) -> None:
        self.boundary = boundary = ErrorBoundary()
        self.pages, self.pool, self.shape = ToyPages(pages, shape), ToyPool(pages), shape

        def start(rank: int) -> Any:
            of_rank = self.pages.of_rank(rank)
            return start_worker(
                config, "toy", of_rank, device, identity=[], model="toy", boundary=boundary
            )

        with ThreadPoolExecutor(shape.ranks) as threads:
            self.workers = list(threads.map(start, range(shape.ranks)))
        session = attach_session(config, "toy")
        cache = make_cache(
            config, session, keeps_blocks=True, follows_requests=True, step_blocks=pages
        )
        self.cache = cast("KVCache", cache)
        chooser = make_chooser(config, mode, session.arena.spec, self.cache)
        groups = shape.groups
        keys = BlockKeys(groups, lambda _: b"")
        engine = EngineCache(session, self.cache, groups, keys, chooser, boundary, access=access)
        self.side = RequestSide(engine, StepOrders, load_ahead=True)
        self.side.bind_pool(self.pool)
        self.requests: dict[str, ToyRequest] = {}
        self.waiting, self.running = list[ToyRequest](), list[ToyRequest]()
        self.loading = dict[str, ToyRequest]()
        self.preempted, self.ended = list[str](), list[str]()
        self._received = Counter[str]()

    def add(self, prompt: Sequence[int], max_tokens: int = 3, **options: Any) -> ToyRequest:
        name, page = f"r{len(self.requests)}", self.shape.page
        request = self.requests[name] = ToyRequest(name, [*prompt], max_tokens, page, **options)
        self.waiting.append(request)
        self.side.queued(request)
        return request

    def step(self, budget: int = 24) -> None:
        step = ScheduledStep({}, 0, placed=[], request_ids=[], new_blocks=[])
        for request in list(self.running):
            if request in self.running and budget:
                budget -= self._continue(request, budget, step)
        for request in [] if self.preempted else list(self.waiting):
            budget -= self._begin(request, budget, step)
        tokens, step.total_tokens = step.tokens, sum(step.tokens.values())
        step.preempted, step.ended, self.preempted, self.ended = self.preempted, self.ended, [], []
        orders = self.side.step(step)
        for worker in self.workers:
            worker.fence(orders)
            worker.start_loads(orders)
            worker.wait_for_layer("layer")
        wrong = {self.pages.compute(self.requests[name], tokens[name]) for name in tokens}
        bad = set[int]()
        for worker in self.workers:
            worker.start_stores(orders)
            worker.finished(orders)
            bad |= worker.take_bad_blocks()
            self._received.update(worker.take_finished())
        assert wrong <= {0, *bad}, "a step has computed on wrong bytes"
        for name in [*tokens, *self.loading]:
            self.requests[name].recompute(bad)
        report, *_ = [worker.report(orders) for worker in self.workers]
        self.side.step_ended(report, bad)
        for name in self._loaded_by_all():
            self._loaded(self.loading.pop(name))
        for request in [self.requests[name] for name in tokens]:
            self.pool.register(request)
            if request.num_computed_tokens == request.num_tokens and request.sample():
                self.end(request)

    def _loaded_by_all(self) -> list[str]:
        """The requests that all ranks have loaded, each once."""
        names = [name for name, ranks in self._received.items() if ranks == self.shape.ranks]
        for name in names:
            del self._received[name]
        return names

    def _continue(self, request: ToyRequest, budget: int, step: Any) -> int:
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        while (new := self.pool.take((), request.lacks(count))) is None:
            self.preempt(victim := self.running[-1])
            if victim is request:
                return 0
        request.table += new
        step.tokens[request.request_id] = count
        step.request_ids.append(request.request_id)
        step.new_blocks.append((new,) if new else None)
        return count

    def _begin(self, request: ToyRequest, budget: int, step: Any) -> int:
        computed, hits, found, waits = request.num_computed_tokens, list[int](), 0, False
        if not computed:
            hits = self.pool.hits(request.block_hashes[: (request.num_tokens - 1) // request.page])
            answer, waits = self.side.match(request, len(hits) * request.page)
            if answer is None:
                return 0
            found, computed = answer, len(hits) * request.page + answer
        count = 0 if waits else min(request.num_tokens - computed, budget)
        lacks = -(-(computed + count) // request.page) - len(hits) - len(request.table)
        new = self.pool.take(hits, lacks) if waits or count else None
        if new is None:
            if count and not self.running:
                self.preempt(max(self.waiting, key=lambda each: len(each.table)))
            return 0
        request.table += new
        self.side.allocated(request, (request.table,), found)
        request.loaded += found
        self.waiting.remove(request)
        if waits:
            request.after_load = min(computed, request.num_tokens - 1)
            self.loading[request.request_id] = request
        else:
            request.num_computed_tokens, step.tokens[request.request_id] = computed, count
            step.placed.append(Placed(request.request_id, (request.table,), computed))
            self.running.append(request)
        return count

    def _loaded(self, request: ToyRequest) -> None:
        request.num_computed_tokens = request.after_load
        if request.has_ended or not request.num_computed_tokens:
            self.pool.release(request.table)
        if not request.has_ended:
            self.pool.register(request)
            self.waiting.insert(0, request)

    def preempt(self, request: ToyRequest) -> None:
        self._queue_of(request).remove(request)
        self.pool.release(request.table)
        request.num_computed_tokens, request.preemptions = 0, request.preemptions + 1
        self.waiting.insert(0, request)
        self.preempted.append(request.request_id)

    def _queue_of(self, request: ToyRequest) -> list[ToyRequest]:
        return self.running if request in self.running else self.waiting

    def end(self, request: ToyRequest) -> None:
        request.has_ended = True
        self.ended.append(request.request_id)
        self.side.finished(request)
        if request.request_id not in self.loading:
            self._queue_of(request).remove(request)
            self.pool.release(request.table)
