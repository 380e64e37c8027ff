# SPDX-License-Identifier: Apache-2.0
"""The smallest engine over a `RequestSide`: a block pool with a prefix cache, steps, chunked
prefill, preemption. Each step checks the bytes of all tokens that it computes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from toy_blocks import BLOCK, GROUPS, ToyPages, ToyPool, ToyRequest

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.orders import StepOrders
from flexkv.engine.scheduler.engine_cache import EngineCache
from flexkv.engine.scheduler.fills import StoreTime
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.scheduler.scheduled_step import Placed, ScheduledStep
from flexkv.engine.scheduler.side import RequestSide
from flexkv.engine.start import attach_session, make_chooser, make_own_cache, operator_access
from flexkv.engine.worker.pages import Device
from flexkv.engine.worker.start_worker import start_worker
from flexkv.operators.verbs import PromptQuestion


class ToyKeys:
    """The keys of toy prompts, two at a time."""

    block_tokens = BLOCK

    def count(self, question: PromptQuestion) -> int:
        return len(question.tokens) // BLOCK or len(question.hashes)

    def parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        request = ToyRequest("q", [*question.tokens], 1, cache_salt=question.cache_salt)
        keys = request.block_hashes or [bytes.fromhex(each) for each in question.hashes]
        for start in range(0, len(keys), 2):
            yield keys[start : start + 2]

    def others(self, question: PromptQuestion, blocks: int | None = None) -> Iterator[list[bytes]]:
        return iter(())


class ToyEngine:
    """Requests go in with `add`; `step` runs a step."""

    def __init__(
        self, config: CacheConfig, device: Device, blocks: int, mode: LoadMode, time: StoreTime
    ) -> None:
        self.boundary = boundary = ErrorBoundary()
        self.pages, self.pool = ToyPages(blocks), ToyPool(blocks)
        pages = self.pages.of_rank()
        self.worker = start_worker(
            config, "toy", pages, device, identity=[], model="toy", boundary=boundary
        )
        session = attach_session(config, "toy")
        cache = make_own_cache(config, session, keeps_blocks=True, follows_requests=True)
        chooser = make_chooser(config, mode, session.arena.spec, cache)
        engine = EngineCache(
            session,
            cache,
            GROUPS,
            BlockKeys(GROUPS, lambda _: b""),
            boundary,
            access=operator_access(config, ToyKeys()),
        )
        self.side = RequestSide(engine, chooser, time, StepOrders, load_ahead=True)
        self.side.bind_pool(self.pool)
        self.cache, self.requests = cache, dict[str, ToyRequest]()
        self.waiting, self.running = list[ToyRequest](), list[ToyRequest]()
        self.loading, self.held = dict[str, ToyRequest](), dict[str, list[int]]()
        self.preempted, self.ended = list[str](), list[str]()

    def add(self, prompt: Sequence[int], max_tokens: int = 3, **options: Any) -> ToyRequest:
        request = ToyRequest(f"r{len(self.requests)}", [*prompt], max_tokens, **options)
        self.requests[request.request_id] = request
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
        self.worker.fence(orders)
        self.worker.start_loads(orders)
        self.worker.wait_for_layer("layer")
        wrong = {self.pages.compute(self.requests[name], tokens[name]) for name in tokens}
        self.worker.start_stores(orders)
        self.worker.finished(orders)
        bad, (sent, received) = self.worker.take_bad_blocks(), self.worker.take_finished()
        assert wrong <= {0, *bad}, "a step has computed on wrong bytes"
        for name in [*tokens, *self.loading]:
            self.requests[name].recompute(bad)
        self.side.step_ended(self.worker.report(orders), bad)
        for name in sent:
            self.pool.release(self.held.pop(name))
        for name in received:
            self._loaded(self.loading.pop(name))
        for request in [self.requests[name] for name in tokens]:
            self.pool.register(request)
            if request.num_computed_tokens == request.num_tokens and request.sample():
                self.end(request)

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
            hits = self.pool.hits(request.block_hashes[: (request.num_tokens - 1) // BLOCK])
            answer, waits = self.side.match(request, len(hits) * BLOCK)
            if answer is None:
                return 0
            found, computed = answer, len(hits) * BLOCK + answer
        count = 0 if waits else min(request.num_tokens - computed, budget)
        lacks = -(-(computed + count) // BLOCK) - len(hits) - len(request.table)
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
        if self.side.finished(request, (request.table,)):
            self.held[request.request_id] = request.table
        if request.request_id not in self.loading:
            self._queue_of(request).remove(request)
            if request.request_id not in self.held:
                self.pool.release(request.table)
