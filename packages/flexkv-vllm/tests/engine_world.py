# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's real scheduler, FlexKV's real sides and movers, and a model
runner that writes recognisable bytes.

The tokens that the runner samples are a digest of the tokens before them, so every request's whole
text is known from its prompt. The bytes of a token's KV are a digest of all tokens up to it, of the
layer and of the head: what attention would compute them from. Before a request is "computed" on,
the runner reads every byte that the scheduler says is there already, and compares. So whatever
goes wrong between FlexKV and vLLM (a block reused too early, a torn copy, a wrong slot) shows as a
wrong byte, at once.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from connector_rank import ConnectorRank, each_thread_is_a_worker, flexkv_of
from kv_pages import BLOCK_TOKENS, HEAD_BYTES, HEADS, LAYERS, make_pages
from patience import wait_until
from pauses import pause
from ranks import Rank
from staged_workers import StagedWorkers, Step
from standstill import step_to_end
from texts import Text
from vllm import SamplingParams
from vllm.distributed.kv_events import EventPublisher
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from world_config import (
    DRAFT_LAYER,
    GUESSES,
    LLAMA,
    PLUGIN,
    Drafts,
    config_of_stage,
    disk_settings,
    layers_of_stage,
    make_config,
    make_hasher,
    make_kv_cache_config,
)

from flexkv.host.board import CELLS
from flexkv_vllm.orders import StepMetadata
from packages.inside import (
    assert_no_fetch,
    assert_no_lease,
    believe_rate,
    board_of,
    cache_of,
    chooser_of,
    free_cells,
    index_of,
    set_step_clock,
)
from packages.inside_adapters import assert_untracked, events_of, poll_side, scheduler_of
from packages.late_mover import LateMover
from packages.tier_blocks import assert_no_slot_is_lost

TOKEN_SECONDS = 1.0
"""What the model takes to compute a token, by the clock that FlexKV measures steps with: loads are
worth it, however busy this machine is just now."""


class EventRecorder(EventPublisher):
    """Takes the place of the socket that vLLM publishes KV events on."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def publish(self, events: Any) -> None:
        self.events.extend(events.events)

    def shutdown(self) -> None:
        pass


class World(StagedWorkers):
    """Requests go in with `add`; `step` runs one engine step; `run` steps until all have ended.

    Beside full attention the model may have sliding windows, of so many tokens each. What a draft
    model has computed is not checked.

    With `guesses` it decodes speculatively; those say which guesses are right.

    Requests have up to `context` tokens. `role` is vLLM's `kv_role` of FlexKV's connector.

    With several `stages`, each has some of the layers, and vLLM schedules as many steps before it
    asks for the result of the first: a stage runs a step when the one before it has.

    With `lag`, vLLM schedules asynchronously: a step is scheduled before the result of the last one
    is known, and the workers run it now or later, as `lag` decides.

    Attributes:
        closing: what is to be done before the world closes.
    """

    hash_tokens = BLOCK_TOKENS  # of one of vLLM's block hashes

    def __init__(
        self,
        directory: Path,
        *,
        num_blocks: int = 64,
        slots: int = 64,
        ranks: int = 1,
        stages: int = 1,
        entry: str = PLUGIN,
        block_tokens: int = BLOCK_TOKENS,
        budget: int = 128,
        policy: str = "recompute",
        max_requests: int = 8,
        lag: random.Random | None = None,
        disk_slots: int = 0,
        settings: dict[str, Any] | None = None,
        events: bool = False,
        windows: tuple[int, ...] = (),
        drafts: Drafts = Drafts.NONE,
        guesses: random.Random | None = None,
        context: int = 2048,
        role: str = "kv_both",
    ) -> None:
        slot_bytes = 4096 * -(-block_tokens * HEAD_BYTES * HEADS * LAYERS // 4096)
        self.vllm_config = make_config(
            directory,
            slots * slot_bytes,
            ranks=ranks,
            stages=stages,
            entry=entry,
            block_tokens=block_tokens,
            budget=budget,
            policy=policy,
            max_requests=max_requests,
            async_scheduling=lag is not None,
            settings=disk_settings(directory, disk_slots, slot_bytes) | (settings or {}),
            events=events,
            guesses=guesses is not None,
            context=context,
            role=role,
        )
        self.vllm_config.cache_config.num_gpu_blocks = num_blocks
        self.entry = entry
        self.windows = windows
        self.drafts = drafts
        self.guesses = guesses
        self.num_blocks = num_blocks
        self.stages = stages
        self.lag = lag
        self.closing = contextlib.ExitStack()
        kv_cache_config = self._make_kv_cache_config(ranks)
        self.ranks = self._start_ranks(ranks, kv_cache_config)
        scheduler_class: Any = self.vllm_config.scheduler_config.get_scheduler_cls()
        self.scheduler: Scheduler = scheduler_class(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK_TOKENS,
            hash_block_size=self.hash_tokens,
            log_stats=True,
        )
        self.computed_seconds = 0.0
        self._set_clock()
        self.recorder = EventRecorder()
        self.scheduler.kv_event_publisher = self.recorder
        self.aggregator = KVOutputAggregator(len(self.ranks))
        self.hasher = make_hasher(self.vllm_config, self.hash_tokens)
        self.weights = b""
        self.steps: deque[Step] = deque()
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, Text] = {}
        self.outputs: dict[str, list[int]] = {}
        self.external_tokens: dict[str, int] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.stats: list[dict[str, float]] = []
        self.preemptions = 0
        self.late_movers: list[LateMover] = []
        self.closed = False

    def _make_kv_cache_config(self, ranks: int) -> KVCacheConfig:
        return make_kv_cache_config(self.num_blocks, self.windows, ranks, self.drafts)

    def _set_clock(self) -> None:
        """FlexKV sees steps take as long as their tokens do, and not as this machine does."""
        if self.side is not None:
            set_step_clock(chooser_of(self.side), lambda: self.computed_seconds)

    def _start_ranks(self, ranks: int, kv_cache_config: KVCacheConfig) -> Sequence[Rank]:
        """Workers that have met."""
        made = [
            ConnectorRank(
                number,
                ranks,
                self.windows,
                self._make_pages(ranks, stage),
                connector=KVConnectorFactory.create_connector(
                    self.vllm_config,
                    KVConnectorRole.WORKER,
                    config_of_stage(kv_cache_config, stage, self.stages),
                ),
                defers_saves=self.guesses is not None,
                stage=stage,
                stages=self.stages,
            )
            for stage in range(self.stages)
            for number in range(ranks)
        ]
        with each_thread_is_a_worker():
            run_together([rank.register for rank in made])
        return made

    def _make_pages(self, ranks: int, stage: int) -> dict[str, torch.Tensor]:
        pages = make_pages(self.num_blocks, ranks, 1 + len(self.windows))
        pages = {name: pages[name] for name in layers_of_stage(pages, stage, self.stages)}
        if self.drafts is Drafts.OWN_GROUP:
            pages[DRAFT_LAYER] = pages["layer0"]
        elif self.drafts is Drafts.SHARED_GROUP:
            pages[DRAFT_LAYER] = pages["layer0"].clone()
        return pages

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def side(self) -> Any:
        """FlexKV's scheduler side, behind whichever connector vLLM made."""
        return scheduler_of(flexkv_of(self.connector))

    @property
    def events(self) -> Any:
        """What reports KV events; None if nobody listens."""
        return events_of(flexkv_of(self.connector))

    @property
    def cache(self) -> Any:
        return cache_of(self.side)

    @property
    def checked_bytes(self) -> int:
        return sum(rank.checked_bytes for rank in self.ranks)

    def poll(self) -> None:
        """See what has ended, without a step of the engine."""
        poll_side(self.side)

    def believe(self, rate: float) -> None:
        """FlexKV has measured nothing but loads of so many bytes per second."""
        believe_rate(chooser_of(self.side), rate)

    def settle(self) -> None:
        """Until no copy and no disk operation is under way. At rest no worker polls its copies."""
        for late in self.late_movers:
            late.catch_up()
        if self.is_on:
            wait_until(lambda: not self.cache.busy, self.poll)

    @property
    def is_on(self) -> bool:
        """Whether FlexKV was not turned off."""
        return self.side is not None and not self.side.is_off

    def assert_at_rest(self) -> None:
        """All requests have ended, and nothing is kept for any: no block of the engine's, no cell,
        lease or reserved slot, no fetch, and nothing that is known of one."""
        # All but vLLM's null block.
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        if not self.is_on:
            return
        self.settle()
        assert sorted(free_cells(board_of(self.cache))) == list(range(CELLS))
        assert_no_lease(self.cache)
        assert_no_slot_is_lost(index_of(self.cache))
        assert_no_fetch(self.cache)
        self.assert_untracked()

    def assert_untracked(self) -> None:
        """Of requests that have ended nothing is known any more, on either side."""
        assert_untracked(self.side, StepMetadata())
        for rank in self.ranks:
            rank.assert_at_rest()

    def slow_down(
        self,
        rng: random.Random,
        polls: tuple[int, int] = (0, 6),
        failure_rate: float = 0.0,
    ) -> list[LateMover]:
        """Put late movers before those of all ranks."""
        self.late_movers = [
            late for rank in self.ranks for late in rank.slow_down(rng, polls, failure_rate)
        ]
        return self.late_movers

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        salt: str | None = None,
        adapter: LoRARequest | None = None,
        params: Any = None,
        images: Any = None,
        session: str | None = None,
    ) -> str:
        request_id = f"r{len(self.outputs)}"
        request = Request(
            request_id,
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                extra_args=None if params is None else {"kv_transfer_params": params},
            ),
            None,
            mm_features=images,
            cache_salt=salt,
            lora_request=adapter,
            block_hasher=self.hasher,
        )
        if session is not None:
            request.session_id = session
        self.outputs[request_id] = []
        self.requests[request_id] = request
        self.texts[request_id] = Text(prompt)
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        if self.scheduler.has_requests() or not self.steps:
            output = self.scheduler.schedule()
            self._check_stores(output.kv_connector_metadata)
            self.preemptions += len(output.preempted_req_ids or ())
            self.steps.append(Step(output))
            self._run_ahead()
            under_way = max(self.stages, 1 if self.lag is None else 2)
            full = len(self.steps) >= under_way
            if not full and output.total_num_scheduled_tokens:
                return
        self.finish_step()

    def _check_stores(self, orders: Any) -> None:
        """Stores read only blocks that vLLM keeps for somebody until the step has run."""
        if isinstance(orders, StepMetadata):
            blocks = self.scheduler.kv_cache_manager.block_pool.blocks
            read = {block for order in orders.stores for block in order.engine_blocks}
            assert [block for block in read if blocks[block].ref_cnt == 0] == []

    def finish_step(self) -> None:
        """Run the oldest step that was scheduled, and take its result."""
        step = self.steps.popleft()
        while step.result is None:
            self._run_stage(step)
        self.computed_seconds += step.output.total_num_scheduled_tokens * TOKEN_SECONDS
        for outputs in self.scheduler.update_from_output(step.output, step.result).values():
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.stats.append(outputs.scheduler_stats.kv_connector_stats)
            for item in outputs.outputs:
                self.outputs[item.request_id].extend(item.new_token_ids)
                if item.kv_transfer_params is not None:
                    self.answers[item.request_id] = item.kv_transfer_params
                if item.prefill_stats is not None:
                    hits = item.prefill_stats.num_external_cached_tokens
                    self.external_tokens[item.request_id] = hits
        self._guess(step.output)

    def _guess(self, output: SchedulerOutput) -> None:
        """Tell vLLM what a draft model has guessed after this step. With steps scheduled ahead it
        only knows how many guesses there are."""
        if self.guesses is None or self.lag is not None:
            return
        running = [each for each in output.num_scheduled_tokens if each in self.scheduler.requests]
        drafts = [self.texts[each].guess(self.guesses, GUESSES) for each in running]
        self.scheduler.update_draft_token_ids(DraftTokenIds(running, drafts))

    def run(self) -> None:
        """Step until all requests have ended.

        Raises:
            AssertionError: they never do.
        """
        step_to_end(self)

    def generate(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        salt: str | None = None,
        params: Any = None,
    ) -> str:
        request_id = self.add(prompt, max_tokens, salt=salt, params=params)
        self.run()
        return request_id

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that only FlexKV can have a prefix, with all that is on
        its way there."""
        if not self.scheduler.has_requests():
            self.settle()
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """End what has not ended, see that nothing is left of it, and shut down. Idempotent."""
        self.closing.close()
        if self.closed:
            return
        self.closed = True
        try:
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self.run()
            self.assert_at_rest()
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        self.scheduler.shutdown()
        for rank in reversed(self.ranks):
            rank.shutdown()

    @property
    def may_reset_connector(self) -> bool:
        """Whether vLLM survives a reset of its connector now."""
        return True

    def restart(self, *, reset_connector: bool) -> bool:
        """Have vLLM begin all that runs anew, with nothing in its prefix cache. False if it refuses
        to, as while a load or a held block is under way, or would lose tokens."""
        if not pause(self):
            return False
        try:
            return self.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=reset_connector
            )
        except RuntimeError:
            return False

    def check_outputs(self) -> None:
        """Whatever a request has said so far is what its text says."""
        for request_id, tokens in self.outputs.items():
            text = self.texts[request_id]
            assert tokens == text.upto(text.prompt_tokens + len(tokens))[text.prompt_tokens :]

    def is_idle(self) -> bool:
        """Whether all requests have ended, and nothing is held for any."""
        # vLLM before 0.22 may rest while blocks of requests that have ended are held, until the
        # next request comes. Here the copies are seen to their end.
        held = self.scheduler.requests
        return not self.scheduler.has_requests() and not held and not self.steps


MakeWorld = Callable[..., World]
"""The fixture `make_world`: closes what it made."""


def run_together(actions: Sequence[Callable[[], object]]) -> None:
    """What waits for one another, in a thread each. Raises what one of them raised, once all have
    ended."""
    with ThreadPoolExecutor(max_workers=len(actions)) as threads:
        futures = [threads.submit(action) for action in actions]
    for future in futures:
        future.result()


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(LLAMA["vocab_size"]) for _ in range(length)]
