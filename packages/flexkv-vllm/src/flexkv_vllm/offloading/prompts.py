# SPDX-License-Identifier: Apache-2.0
"""Follows requests through vLLM's offloading connector, which shows its manager only keys of
blocks: the hit of each prompt, what becomes of it, and how long the engine's steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from flexkv.client import CacheClient
from flexkv.engine.boundary import ErrorBoundary, always, answers
from flexkv.engine.choice.chooser import Left, LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.engine.scheduler.engine import EngineRequest, RequestSpans
from flexkv.engine.scheduler.fetches import fetched_blocks
from flexkv.engine.scheduler.loads import HeldHits
from flexkv.engine.scheduler.reports import HitReports, spans_of
from flexkv.engine.scheduler.request import HitTokens, Match, limited
from flexkv_vllm.offloading.lookups import Lookups
from flexkv_vllm.offloading.offload_keys import OffloadedPromptKeys
from flexkv_vllm.offloading.requests import GroupBlocks, RequestBlocks, RequestMaker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

Answer = tuple[int | None, bool]
"""vLLM's answer to its scheduler: tokens that can be loaded, None for later; and whether the load
is asynchronous."""


class OffloadedPrompts:
    """The requests of one engine under vLLM's offloading connector. Single-threaded.

    Args:
        cache: the cache of the engine.
        maker: makes the states of requests.
        chooser: decides whether a load or a wait is worth its time.
        reports: reports allocated and ended requests; owned.
        boundary: catches errors.

    Attributes:
        figures: figures of the cache.
        by_id: the requests that have not ended.
        hits: the hits whose load is not ordered yet.
        traced: what FlexKV does for requests.
        answers: results of lookups of the prompt that vLLM matches now; the same object always.
        may_find: returns whether any block may be found.
        may_change: returns whether an operator may change the cache; see `OperatorCalls`.
        empty: drops all blocks for an operator, and returns whether that succeeded.
        before_match: called before the first match of each step.
        open_door: called with what makes the keys of prompts for operators, once it is known, and
            whether the model has one group of full attention.
        spans_of_engine: returns what makes spans of requests, for vLLM's configuration.
        got_slots: called with a request and those of its blocks that have got slots.
        pool_bound: called with vLLM's own prefix cache, and the configuration of its groups.
        distrust: called with vLLM's blocks that loads of an ended step, another connector's too,
            did not fill, and the scheduler side of vLLM's connector; see `HeldStores.discard`.
    """

    def __init__(
        self,
        cache: CacheClient,
        maker: RequestMaker,
        chooser: LoadChooser,
        reports: HitReports,
        boundary: ErrorBoundary,
    ) -> None:
        self.hits = HeldHits(cache)
        self.traced = maker.traced
        self.figures = reports.figures
        self._maker = maker
        self.by_id: dict[str, RequestBlocks] = {}
        self.answers: dict[bytes, LookupResult] = {}
        self.may_find: Callable[[], bool] = lambda: True
        self.may_change: Callable[[], bool] = lambda: False
        self.empty: Callable[[], bool] = lambda: False
        self.before_match: Callable[[], None] = lambda: None
        self.spans_of_engine: Callable[[Any], RequestSpans | None] = lambda _: None
        self.open_door: Callable[[OffloadedPromptKeys], None] = lambda _: None
        self.distrust: Callable[[set[int], Any], None] = lambda *_: None
        self.got_slots: Callable[[RequestBlocks, Sequence[bytes]], None] = lambda *_: None
        self.pool_bound: Callable[[Any, Any], None] = lambda *_: None
        self._chooser = chooser
        self._reports = reports
        self._boundary = boundary
        self._lookups: Lookups | None = None
        self._lacking: dict[str, Lookups] = {}
        self._finished: set[str] = set()  # of `by_id`
        self._matches_step = False
        self._steps: deque[int] = deque()  # numbers of the forward passes that have not ended

    # Calls of vLLM's connector that its manager does not see. None of them raises.

    def match(
        self,
        request: EngineRequest,
        groups: Sequence[tuple[int, Sequence[bytes], int, int | None]],
        local_tokens: int,
        limit: int,
        ask: Callable[[], Answer],
    ) -> Answer:
        """See `ConnectorCalls.match`. vLLM's connector looks again if only a part of the hit is to
        be loaded."""
        with self._boundary.turn:
            return self._match(request, groups, local_tokens, limit, ask)

    @answers(always(None), "its hit is not counted")
    def allocated(self, request: EngineRequest, tokens: int) -> None:
        """vLLM gave a request its blocks, and loads `tokens` tokens into them. vLLM calls again
        when the load has ended."""
        blocks = self.by_id.get(request.request_id)
        match = None if blocks is None else blocks.match
        if blocks is None or match is None:
            return
        blocks.match = None
        with self._boundary.guard("reporting a hit", "it is not counted"):
            hit = match.local_tokens + tokens
            used = blocks.used(hit)
            self._reports.allocated(
                request,
                blocks.options,
                match,
                tokens,
                keys=(used, blocks.prompt()),
                fetched=limited(match.fetched, tokens) if blocks.may_load else None,
                others=blocks.others,
            )
            blocks.keep(used)

    @answers(always(None), "it counts as another request for a step more")
    def finished(self, request: EngineRequest) -> None:
        """A request has ended. vLLM tells its manager with the next step, or has done so."""
        if request.request_id in self.by_id:
            self._finished.add(request.request_id)

    @answers(always(None), "it is not measured")
    def step_begins(self, output: SchedulerOutput) -> None:
        """vLLM has scheduled a step."""
        if not output.total_num_scheduled_tokens:
            return
        number = 0
        with self._boundary.guard("timing a step", "it is not measured", loses=False):
            number = self._begin_step(output)
        self._steps.append(number)
        self._chooser.steps_behind = len(self._steps)

    @answers(always(None), "it is not measured")
    def step_ended(self, output: KVConnectorOutput, side: Any) -> None:
        """The results of a step have come; steps end in order."""
        if output.invalid_block_ids:
            self.distrust(output.invalid_block_ids, side)
        with self._boundary.guard("measuring a step", "it is not measured", loses=False):
            self._end_step(output)

    @answers(always(None), "operators get no answers")
    def bound(
        self,
        vllm_config: Any,
        hash_tokens: int,
        groups: Sequence[tuple[int, int, int | None]],
        pool: Any,
        kv_cache_config: Any,
    ) -> None:
        """See `ConnectorCalls.bound`."""
        with self._boundary.guard("following resets", "events are not repeated", loses=False):
            self.pool_bound(pool, kv_cache_config)
        with self._boundary.guard("tracing requests", "they have no spans", loses=False):
            self.traced.spans = self.spans_of_engine(vllm_config)
        if groups:
            algorithm = vllm_config.cache_config.prefix_caching_hash_algo
            keys = OffloadedPromptKeys(algorithm, hash_tokens, groups)
            self.open_door(keys)

    # Calls of the manager.

    @property
    def is_matching(self) -> bool:
        """Whether vLLM relies on what the matches of this step have found."""
        return self._matches_step

    def request(self, context: ReqContext) -> RequestBlocks:
        """The state of a request. It begins with the first call."""
        blocks = self.by_id.get(context.req_id)
        if blocks is None:
            blocks = self.by_id[context.req_id] = self._maker.make(context)
        return blocks

    def lookup(self, key: bytes, request: RequestBlocks) -> LookupResult:
        """The result for a block that `answers` lacks, of the request that is matched now."""
        if self._lookups is None:
            (result,) = request.find((key,))
            # Without a match nothing is fetched.
            return result if result is LookupResult.HIT else LookupResult.MISS
        return self._lookups.lookup(key)

    def describe(self, request: RequestBlocks, keys: Sequence[bytes]) -> None:
        """Blocks of a request have got slots in host memory: events describe them."""
        with self._boundary.guard("describing blocks", "events only name them", loses=False):
            self.got_slots(request, keys)

    def fetch_lacking(self) -> None:
        """The step's matches are over: fetch the blocks that lower tiers have."""
        self._matches_step = False
        while self._lacking:
            request_id, lookups = next(iter(self._lacking.items()))
            request = self.by_id.get(request_id)
            if request is not None:
                pending = lookups.pending()
                request.fetch_lacking(lookups.wanted(), pending, lookups.place)
                self.describe(request, pending)
            del self._lacking[request_id]

    def fetch_nothing(self) -> None:
        """In place of `fetch_lacking`, after an error."""
        self._matches_step = False
        for request_id, lookups in self._lacking.items():
            request = self.by_id.get(request_id)
            if request is not None:
                request.fetch_nothing(lookups.wanted())
        self._lacking.clear()

    def forget(self) -> None:
        """The cache was reset, or its pages may be gone."""
        self._lacking.clear()
        self.hits.release_all()
        for request in self.by_id.values():
            request.forget()

    def ended(self, request_id: str) -> RequestBlocks | None:
        """A request has ended. Returns its state; None if it is unknown."""
        self._lacking.pop(request_id, None)
        self.hits.release(request_id)
        self._finished.discard(request_id)
        return self.by_id.pop(request_id, None)

    def report_ended(self, blocks: RequestBlocks) -> None:
        """Report the end of a request, and release its blocks if it says so."""
        blocks.release()
        if blocks.request is not None:
            self._reports.ended(blocks.request, blocks.prompt, blocks.others)

    def close(self) -> None:
        """Close the recorder."""
        self._reports.close()

    # Steps.

    def _begin_step(self, output: SchedulerOutput) -> int:
        """The number of a step that computes prompts; 0 for others."""
        scheduled = output.num_scheduled_tokens
        guesses = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        # Where all requests decode, there is no prompt to measure.
        if output.total_num_scheduled_tokens <= len(scheduled) + guesses:
            return 0
        return self._chooser.step_begins(spans_of(scheduled, self.by_id))

    def _end_step(self, output: KVConnectorOutput) -> None:
        # A step without a forward pass may end, too. If others are under way, the oldest of these
        # is measured too early: an outlier among others.
        self._chooser.timer.ended(self._steps.popleft() if self._steps else 0)
        # Of all ranks together; None for a step that ended no copy.
        stats = getattr(output.kv_connector_worker_meta, "transfer_stats", None)
        if stats is not None and stats.load.time > 0:
            self._chooser.loaded(stats.load.bytes / stats.load.time)

    # A match.

    def _match(
        self,
        request: EngineRequest,
        groups: Sequence[tuple[int, Sequence[bytes], int, int | None]],
        local_tokens: int,
        limit: int,
        ask: Callable[[], Answer],
    ) -> Answer:
        with self._boundary.guard("lookup", "it is a miss"):
            self._begin_match(request, groups, local_tokens, limit)
        try:
            answer = ask()
            shortens = False
            with self._boundary.guard("choosing a load", "the whole hit is loaded"):
                shortens = bool(answer[0]) and self._shortens(request, local_tokens, answer[0] or 0)
            if shortens:
                answer = ask()
            if answer[0] and not self._hold(request):
                answer = ask()
            with self._boundary.guard("ending a lookup", "the hit is not counted"):
                self._end_match(request, local_tokens, answer[0])
            return answer
        finally:
            self._lookups = None
            self.answers.clear()

    def _begin_match(
        self,
        request: EngineRequest,
        groups: Sequence[tuple[int, Sequence[bytes], int, int | None]],
        local_tokens: int,
        limit: int,
    ) -> None:
        blocks = self.by_id.get(request.request_id)
        if blocks is None or not self.may_find():
            return
        if not self._matches_step:
            self._matches_step = True
            self.before_match()
        self._maker.follow(blocks, request)
        blocks.match = None
        blocks.groups = [GroupBlocks(*group) for group in groups]
        most = blocks.options.max_load_tokens
        if most is not None and blocks.groups:
            tokens = blocks.groups[0].tokens
            limit = min(limit, (local_tokens + most) // tokens * tokens)
        blocks.waits = True
        self._lookups = Lookups(blocks, blocks.groups, local_tokens, limit, self.answers)
        waiting = blocks.waiting(local_tokens)
        if waiting is not None:
            fetch, span = waiting
            blocks.waits = span.tokens > 0 and self._chooser.is_worth_waiting(
                fetch, span, self._others
            )

    @property
    def _others(self) -> int:
        """The engine's requests besides the one that is matched."""
        return len(self.by_id) - len(self._finished) - 1

    def _shortens(self, request: EngineRequest, local_tokens: int, tokens: int) -> bool:
        """Whether less than the hit of `tokens` tokens is to be loaded. Then further lookups find
        no more than that."""
        lookups = self._lookups
        if lookups is None:
            return False
        blocks = self.by_id[request.request_id]
        span = Span(local_tokens, local_tokens + tokens)
        choice = self._chooser.choose_load(
            span,
            lookups.count(tokens),
            whole=len(blocks.groups) > 1,
            others=self._others,
        )
        if choice.left is not None:
            lookups.shorten(choice.blocks)
            lookups.left = choice.left, span.stop
        return choice.left is not None

    def _hold(self, request: EngineRequest) -> bool:
        """Hold the hit of the request that is matched now. Returns False if a part has left:
        further lookups find nothing then."""
        lookups = self._lookups
        if lookups is None:
            return True
        with self._boundary.guard("holding a hit", "it is a miss"):
            if self.hits.hold(request.request_id, lookups.wanted()):
                return True
        lookups.shorten(0)
        return False

    def _end_match(self, request: EngineRequest, local_tokens: int, tokens: int | None) -> None:
        lookups = self._lookups
        if lookups is None:
            return
        blocks = self.by_id[request.request_id]
        if tokens is None:
            if lookups.lacks:
                self._lacking[request.request_id] = lookups
            return
        hit = local_tokens + tokens
        left: list[tuple[Left, int]] = []
        end = hit if lookups.left is None else lookups.left[1]
        waiting = None if blocks.waits else blocks.waiting(local_tokens)
        if waiting is not None and waiting[1].stop > end:
            left.append((Left.AWAITED, waiting[1].stop - end))
        if lookups.left is not None and end > hit:
            left.append((lookups.left[0], end - hit))
        fetched = self._fetched(blocks, hit, tokens)
        blocks.match = Match(local_tokens, fetched, left=tuple(left))
        if tokens == 0:
            blocks.give_up()

    def _fetched(self, blocks: RequestBlocks, hit: int, tokens: int) -> HitTokens:
        """Tokens of the last `tokens` of a hit that came from lower tiers."""
        media = blocks.media() if tokens and blocks.groups else {}
        if not media:
            return {}
        group = blocks.groups[0]
        keys = group.keys[(hit - tokens) // group.tokens : group.until(hit)]
        came = fetched_blocks(media, keys)
        return limited({medium: count * group.tokens for medium, count in came.items()}, tokens)
