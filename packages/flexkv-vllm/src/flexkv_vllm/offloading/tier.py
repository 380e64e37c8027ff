# SPDX-License-Identifier: Apache-2.0
"""FlexKV's disks, buckets and stores below vLLM's own CPU memory: a tier of vLLM's
`TieringOffloadingSpec`. vLLM decides what is stored and loaded, and keeps the blocks in memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from flexkv.engine.boundary import ErrorBoundary, always, answers
from flexkv.engine.key_epoch import KeyEpoch
from flexkv.tiers.base import AnyTier, QueriedTier
from flexkv.tiers.job import Outcome, Priority
from flexkv_vllm.compat.patches import keys_of
from flexkv_vllm.offloading.start_tier import open_below
from flexkv_vllm.weights import WeightWatch

_CLOSE_SECONDS = 5.0
_PAUSE_SECONDS = 0.001


@dataclass(slots=True)
class _Question:
    """Which of some blocks stores have, each by the first store that has answered so; how many have
    not answered yet; and when the request no longer waits for them, as time.monotonic()."""

    left: int = 0
    until: float = 0.0
    tiers: dict[bytes, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Request:
    """What was found out for a request: blocks that stores were queried about, and blocks that
    could not be read, which are misses from then on."""

    asked: dict[bytes, _Question] = field(default_factory=dict)
    wanted: list[bytes] = field(default_factory=list)
    unread: set[bytes] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Job:
    """A job of vLLM's: how many results are missing, and the blocks that are in place."""

    job: TransferJob
    left: int
    done: dict[OffloadKey, None] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)


class FlexKVTier(SecondaryTierManager):
    """vLLM's view of FlexKV below its CPU memory. Errors at start stop the engine on purpose; later
    none are raised. vLLM waits for each job, because its memory is borrowed until then: a drive
    that hangs holds the requests whose blocks it is reading. `settings`: FlexKV's settings, as they
    stand in `secondary_tiers`. Raises FlexKVError if a setting, vLLM's version or the model is not
    allowed; DiskError if a cache directory cannot be used."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._boundary = ErrorBoundary()
        self._epoch = KeyEpoch()
        self._tiers = open_below(offloading_spec.config, settings, primary_kv_view, FlexKVTier)
        self._pages = primary_kv_view.cast("B")
        self._requests: dict[str, _Request] = {}
        self._answers: dict[bytes, LookupResult] = {}  # of this step
        self._jobs: dict[tuple[int, int], tuple[_Job, Sequence[OffloadKey]]] = {}
        self._questions: dict[tuple[int, int], tuple[_Question, Sequence[bytes]]] = {}
        self._done: dict[int, JobResult] = {}
        self._lost_some = False
        self._weights = WeightWatch(self._weights_changed)

    # Requests.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = _Request()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # One block a call, thousands for a long prompt. This cannot fail.
        result = self._answers.get(key)
        return self._look_up(key, req_context) if result is None else result

    @answers(always(LookupResult.MISS), "it is a miss")
    def _look_up(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        """Find the results for all blocks of a request that have none in this step."""
        keys = [each for each in {**keys_of(context), key: 0} if each not in self._answers]
        with self._boundary.guard("lookup", "it is a miss", loses=False):
            self._answers.update(zip(keys, self._find(keys, context.req_id), strict=True))
            return self._answers[key]
        self._answers.update(dict.fromkeys(keys, LookupResult.MISS))
        return LookupResult.MISS

    def _find(self, keys: Sequence[bytes], request_id: str) -> Iterable[LookupResult]:
        request = self._requests.setdefault(request_id, _Request())
        there = [False] * len(keys)
        for tier in self._tiers:
            if not isinstance(tier, QueriedTier):
                there = tier.contains(self._own(keys))
        stores = any(isinstance(tier, QueriedTier) and tier.readable for tier in self._tiers)
        for key, on_disk in zip(keys, there, strict=True):
            question = request.asked.get(key)
            if key in request.unread:
                yield LookupResult.MISS
            elif on_disk or (question is not None and key in question.tiers):
                yield LookupResult.HIT
            elif question is None and stores:
                request.wanted.append(key)
                yield LookupResult.RETRY
            else:
                waits = question and question.left > 0 and time.monotonic() < question.until
                yield LookupResult.RETRY if waits else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        with self._boundary.guard("touching blocks", "they may leave sooner", loses=False):
            for tier in self._tiers:
                if not isinstance(tier, QueriedTier):
                    tier.touch(self._own(list(keys)))

    @answers(always(None), "stores are not queried")
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._answers.clear()
        for request in self._requests.values():
            if request.wanted:
                wanted, request.wanted = request.wanted, []
                self._query(request, wanted)

    def _query(self, request: _Request, keys: Sequence[bytes]) -> None:
        question = _Question()
        request.asked.update(dict.fromkeys(keys, question))
        for number, tier in enumerate(self._tiers):
            if isinstance(tier, QueriedTier) and tier.readable:
                with self._boundary.guard("querying a store", "it counts as having nothing"):
                    until = time.monotonic() + tier.question_seconds
                    ticket = tier.query((), self._own(keys))
                    self._questions[number, ticket] = question, keys
                    question.left += 1
                    question.until = max(question.until, until)

    # Jobs.

    @answers(lambda self, job: self._fail(job), "the blocks are not cached")
    def submit_store(self, job_metadata: TransferJob) -> None:
        # vLLM names a job's blocks in no order. A tier without room drops the end of a prefix.
        context, keys = job_metadata.req_context, list(job_metadata.keys)
        positions = [context.get_offload_key_position(key) or 0 for key in keys]
        order = sorted(range(len(keys)), key=positions.__getitem__)
        job = _Job(job_metadata, 0)
        for number, tier in enumerate(self._tiers):
            self._begin(job, number, order, keys, tier.write)
        self._end_if_done(job)

    @answers(lambda self, job: self._fail(job), "the blocks are computed")
    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        asked = self._requests.get(job_metadata.req_context.req_id, _Request()).asked
        parts: dict[int, list[int]] = {}
        for number, tier in enumerate(self._tiers):
            if isinstance(tier, QueriedTier):
                has = [key in asked and asked[key].tiers.get(key) == number for key in keys]
            else:
                has = tier.contains(self._own(keys))
            taken = {at for part in parts.values() for at in part}
            parts[number] = [at for at in range(len(keys)) if has[at] and at not in taken]
        job = _Job(job_metadata, 0)
        for number, order in parts.items():
            read = functools.partial(self._tiers[number].read, priority=Priority.LOAD)
            self._begin(job, number, order, keys, read)
        self._end_if_done(job)

    def _begin(
        self,
        job: _Job,
        number: int,
        order: Sequence[int],
        keys: Sequence[OffloadKey],
        submit: Callable[[Sequence[bytes], Sequence[memoryview]], int],
    ) -> None:
        """Let a tier read or write those of the job's blocks whose places `order` has. An error may
        leave vLLM's memory borrowed."""
        if not order:
            return
        size, places = self.block_size_bytes, job.job.chunk_ids.tolist()
        own = [keys[at] for at in order]
        buffers = [self._pages[places[at] * size : (places[at] + 1) * size] for at in order]
        ticket = submit(self._own(own), buffers)
        self._jobs[number, ticket] = job, own
        job.left += len(own)

    def _end_if_done(self, job: _Job) -> None:
        if job.left:
            return
        whole, promotes = job.job, job.job.is_promotion
        missing = set(whole.keys).difference(job.done)
        if promotes and missing and (request := self._requests.get(whole.req_context.req_id)):
            request.unread.update(missing)
        seconds, size = time.monotonic() - job.begun, len(job.done) * self.block_size_bytes
        keys = list(job.done) if promotes else None
        self._done[whole.job_id] = JobResult(whole.job_id, not missing, keys, seconds, size)

    def _fail(self, job: TransferJob) -> None:
        """After an error in a submission. Copies that have begun keep vLLM's memory borrowed."""
        self._lost_some = True
        self._jobs[-1, job.job_id] = _Job(job, len(job.keys)), ()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._poll()
        done, self._done = self._done, {}
        if done:
            self._jobs = {
                each: found for each, found in self._jobs.items() if found[0].job.job_id not in done
            }
        return done.values()

    @answers(always(None), "jobs that ended are seen later")
    def _poll(self) -> None:
        if self._lost_some and not self._end_lost():
            return
        with self._boundary.guard("polling tiers", "jobs that ended are seen later"):
            for number, tier in enumerate(self._tiers):
                self._take_results(number, tier)
            return
        self._lost_some = True

    def _take_results(self, number: int, tier: AnyTier) -> None:
        for ticket, position, outcome in tier.poll():
            found = self._jobs.get((number, ticket))
            if found is None:
                continue
            job, keys = found
            job.left -= 1
            if outcome is Outcome.DONE:
                job.done[keys[position]] = None
            self._end_if_done(job)
        if isinstance(tier, QueriedTier):
            for answer in tier.drain_answers():
                self._take_answer(number, answer.ticket, answer.has)

    def _take_answer(self, number: int, ticket: int, has: Sequence[bool] | None) -> None:
        question, keys = self._questions.pop((number, ticket), (_Question(), ()))
        question.left -= 1
        for key, there in zip(keys, has or (), strict=False):
            if there:
                question.tiers.setdefault(key, number)

    def _end_lost(self) -> bool:
        """After an error that may have lost a result: end all jobs as failed, once no tier borrows
        memory any more. Returns whether that is so."""
        at_rest = [tier.drain() for tier in self._tiers]
        if not all(at_rest):
            return False
        for request in self._requests.values():
            request.asked.clear()
        self._questions.clear()
        for job, _ in self._jobs.values():
            job.left = 0
            job.done.clear()
            self._end_if_done(job)
        self._lost_some = False
        return True

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._questions or self._done)

    def drain_jobs(self) -> None:
        """Wait for all jobs, and discard the blocks unless vLLM pauses with the same weights: vLLM
        calls this when it resets its caches, and nothing else."""
        for number, ticket in self._jobs:
            if number >= 0:
                with self._boundary.guard("cancelling a job", "vLLM waits for it", loses=False):
                    self._tiers[number].cancel(ticket)
        while any(job.job.job_id not in self._done for job, _ in self._jobs.values()):
            self._poll()
            time.sleep(_PAUSE_SECONDS)
        self._weights.reset(lambda: True, lambda cause: self._discard())

    def shutdown(self) -> None:
        """Close the tiers. Raises RuntimeError if one hangs: it may still use vLLM's memory, which
        vLLM then leaves mapped."""
        for tier in self._tiers:
            tier.begin_close(0.0)
        closed = [tier.close(_CLOSE_SECONDS) for tier in self._tiers]
        if not all(closed):
            raise RuntimeError("a device of FlexKVTier hangs and may still use vLLM's memory")
        self._tiers = []
        self._pages.release()

    def _own(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        end = self._epoch.end
        return [key + end for key in keys]

    def _weights_changed(self, *, sure: bool) -> None:
        with self._boundary.turn:
            if sure:
                # Other engines, and this one after a restart, find the blocks so far.
                self._epoch.renew()
                self._forget_answers()
            else:
                self._discard()

    def _discard(self) -> bool:
        # The keys first: an error after this leaves no block to be found by those of before.
        self._epoch.renew()
        self._forget_answers()
        for tier in self._tiers:
            with self._boundary.guard("reset", "its blocks stay, under keys that nobody asks for"):
                tier.clear()
        return True

    def _forget_answers(self) -> None:
        self._answers.clear()
        for request in self._requests.values():
            request.asked.clear()
