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

import hashlib
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kv_pages import (
    BLOCK_TOKENS,
    HEAD_BYTES,
    HEADS,
    LAYERS,
    heads_of,
    make_pages,
    token_bytes,
)
from vllm import SamplingParams
from vllm.distributed.kv_events import EventPublisher
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from world_config import (
    LLAMA,
    PLUGIN,
    disk_settings,
    make_config,
    make_kv_cache_config,
)

from flexkv_vllm.adapter import Adapter
from flexkv_vllm.scheduler.side import StoreTime


@dataclass(slots=True)
class Rank:
    """One worker: its KV pages, its part of FlexKV, and its copy of the block tables."""

    number: int
    adapter: Adapter
    pages: dict[str, torch.Tensor]
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    wrong: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Requests that the running step computes on wrong bytes, with the first such block."""


class Text:
    """A request's tokens: its prompt, and what the runner makes of it, as far as it was asked."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt_tokens = len(prompt)
        self.tokens = list(prompt)
        self.sampled = 0
        self._digest = hashlib.blake2b(repr(prompt).encode(), digest_size=4)

    def upto(self, count: int) -> list[int]:
        while len(self.tokens) < count:
            self._digest.update(self.tokens[-1].to_bytes(4, "little"))
            number = int.from_bytes(self._digest.digest(), "little")
            self.tokens.append(number % LLAMA["vocab_size"])
        return self.tokens[:count]

    def sample(self, computed: int) -> list[int]:
        """The next token, if `computed` tokens are all that there are so far."""
        if computed < self.prompt_tokens + self.sampled:
            return []
        self.sampled += 1
        return [self.upto(computed + 1)[-1]]


class EventRecorder(EventPublisher):
    """Takes the place of the socket that vLLM publishes KV events on."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def publish(self, events: Any) -> None:
        self.events.extend(events.events)

    def shutdown(self) -> None:
        pass


@dataclass(slots=True)
class Step:
    """A step that was scheduled, and its result once the workers have run it."""

    output: SchedulerOutput
    result: ModelRunnerOutput | None = None


class World:
    """Requests go in with `add`; `step` runs one engine step; `run` steps until all have ended.

    Beside full attention the model may have sliding windows, of so many tokens each.

    With `lag`, vLLM schedules asynchronously: a step is scheduled before the result of the last one
    is known, and the workers run it now or later, as `lag` decides.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_blocks: int = 64,
        slots: int = 64,
        ranks: int = 1,
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
    ) -> None:
        slot_bytes = 4096 * -(-block_tokens * HEAD_BYTES * HEADS * LAYERS // 4096)
        self.vllm_config = make_config(
            directory,
            slots * slot_bytes,
            ranks=ranks,
            entry=entry,
            block_tokens=block_tokens,
            budget=budget,
            policy=policy,
            max_requests=max_requests,
            async_scheduling=lag is not None,
            settings=disk_settings(directory, disk_slots, slot_bytes) | (settings or {}),
            events=events,
        )
        self.lag = lag
        self.steps: deque[Step] = deque()
        self.vllm_config.cache_config.num_gpu_blocks = num_blocks
        self.num_blocks = num_blocks
        self.windows = windows
        kv_cache_config = make_kv_cache_config(num_blocks, windows)
        self.fenced = entry == PLUGIN
        self.ranks = self._start_ranks(ranks, kv_cache_config)
        scheduler_class: Any = self.vllm_config.scheduler_config.get_scheduler_cls()
        self.scheduler: Scheduler = scheduler_class(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.recorder = EventRecorder()
        self.scheduler.kv_event_publisher = self.recorder
        self.requests: dict[str, Request] = {}
        self.weights = b""
        self.stats: list[dict[str, float]] = []
        self.aggregator = KVOutputAggregator(ranks)
        hash_fn = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        self.texts: dict[str, Text] = {}
        self.outputs: dict[str, list[int]] = {}
        self.external_tokens: dict[str, int] = {}
        self.preemptions = 0
        self.checked_bytes = 0

    def _start_ranks(self, ranks: int, kv_cache_config: KVCacheConfig) -> list[Rank]:
        time = StoreTime.STEP if self.fenced else StoreTime.FINISH
        made = [
            Rank(number, Adapter(self.vllm_config, time), self._make_pages(ranks))
            for number in range(ranks)
        ]
        threads = [
            threading.Thread(
                target=rank.adapter.start_worker, args=(rank.pages, kv_cache_config, rank.number)
            )
            for rank in made
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    def _make_pages(self, ranks: int) -> dict[str, torch.Tensor]:
        return make_pages(self.num_blocks, ranks, 1 + len(self.windows))

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def side(self) -> Any:
        """FlexKV's scheduler side, behind whichever connector vLLM made."""
        connector = self.connector
        adapter = getattr(connector, "_adapter", None) or connector._flexkv_connector._adapter
        return adapter._scheduler

    @property
    def cache(self) -> Any:
        return self.side._cache

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        salt: str | None = None,
        adapter: LoRARequest | None = None,
        params: Any = None,
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
            cache_salt=salt,
            lora_request=adapter,
            block_hasher=self.hasher,
        )
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
            self.preemptions += len(output.preempted_req_ids or ())
            self.steps.append(Step(output))
            if self.lag is not None and self.lag.random() < 0.5:
                self._run_workers()
            full = self.lag is None or len(self.steps) > 1
            if not full and output.total_num_scheduled_tokens:
                return
        self.finish_step()

    def finish_step(self) -> None:
        """Run the oldest step that was scheduled, and take its result."""
        self._run_workers()
        step = self.steps.popleft()
        assert step.result is not None
        for outputs in self.scheduler.update_from_output(step.output, step.result).values():
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self.stats.append(outputs.scheduler_stats.kv_connector_stats)
            for item in outputs.outputs:
                self.outputs[item.request_id].extend(item.new_token_ids)
                if item.prefill_stats is not None:
                    hits = item.prefill_stats.num_external_cached_tokens
                    self.external_tokens[item.request_id] = hits

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            # vLLM before 0.22 may rest while blocks of requests that have ended are held, until the
            # next request comes. Here the copies are seen to their end.
            held = self.scheduler.requests
            if not self.scheduler.has_requests() and not held and not self.steps:
                return
            self.step()
        raise AssertionError(f"requests did not end: {list(self.scheduler.requests)}")

    def generate(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        salt: str | None = None,
        params: Any = None,
    ) -> str:
        request_id = self.add(prompt, max_tokens, salt, params=params)
        self.run()
        return request_id

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that only FlexKV can have a prefix."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in reversed(self.ranks):
            rank.adapter.shutdown()

    def check_outputs(self) -> None:
        """Whatever a request has said so far is what its text says."""
        for request_id, tokens in self.outputs.items():
            text = self.texts[request_id]
            assert tokens == text.upto(text.prompt_tokens + len(tokens))[text.prompt_tokens :]

    def _run_workers(self) -> None:
        for step in self.steps:
            if step.result is None:
                output = pickle.loads(pickle.dumps(step.output))
                step.result = self.aggregator.aggregate(
                    [self._run_rank(rank, output) for rank in self.ranks]
                )
                cached = output.scheduled_cached_reqs
                for request_id, known in zip(cached.req_ids, cached.num_output_tokens, strict=True):
                    # vLLM may have thrown away what was sampled as its request was preempted.
                    if request_id in cached.resumed_req_ids:
                        self.texts[request_id].sampled = known
                for i, (request_id, _, computed) in enumerate(scheduled(output)):
                    # What is computed on a load that failed is nonsense, and vLLM must drop it.
                    nonsense = any(request_id in rank.wrong for rank in self.ranks)
                    sampled = [0] if nonsense else self.texts[request_id].sample(computed)
                    step.result.sampled_token_ids[i] = sampled

    def _run_rank(self, rank: Rank, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        if self.fenced:
            rank.adapter.fence(metadata)
        self._follow_tables(rank, output)
        rank.wrong.clear()
        before = bool(metadata.layerwise or metadata.unfilled) if self.fenced else False
        if before:
            rank.adapter.start_loads(metadata)
        for request_id, start, end in scheduled(output):
            self._forward(rank, request_id, start, end)
        if not before:
            rank.adapter.start_loads(metadata)
        rank.adapter.start_stores(metadata)
        sent, received = rank.adapter.get_finished(metadata)
        bad_blocks = rank.adapter.take_bad_blocks()
        for block, message in rank.wrong.values():
            assert block in bad_blocks, message
        request_ids = [request_id for request_id, _, _ in scheduled(output)]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[[] for _ in request_ids],
            kv_connector_output=KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                invalid_block_ids=bad_blocks,
                kv_connector_stats=rank.adapter.take_stats() if self.fenced else None,
                kv_connector_worker_meta=rank.adapter.step_report(metadata),
                **failed_requests(rank.adapter.take_failed_requests()),
            ),
        )

    def _follow_tables(self, rank: Rank, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            rank.tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            rank.tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                rank.tables[request_id] = [[] for _ in rank.tables[request_id]]
            for table, more in zip(rank.tables[request_id], blocks or (), strict=False):
                table.extend(more)

    def _forward(self, rank: Rank, request_id: str, start: int, end: int) -> None:
        for group, table in enumerate(rank.tables[request_id]):
            self._forward_group(rank, request_id, group, torch.tensor(table), range(start, end))

    def _forward_group(
        self, rank: Rank, request_id: str, group: int, table: torch.Tensor, tokens: range
    ) -> None:
        heads = heads_of(rank.number, len(self.ranks))
        start, end = tokens.start, tokens.stop
        weights = self.weights + bytes(group)
        expected = token_bytes(self.texts[request_id].upto(end), weights)[:, :, heads]
        first = max(0, start - self.windows[group - 1] + 1) if group else 0
        positions = torch.arange(end)
        blocks, places = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        seen = slice(first, start)
        for layer in range(LAYERS):
            name = f"layer{group * LAYERS + layer}"
            rank.adapter.wait_for_layer(name)
            pages = rank.pages[name]
            there = pages[blocks[seen], :, places[seen]]
            if not torch.equal(there, expected[layer, seen]):
                differs = (there != expected[layer, seen]).flatten(1).any(dim=1)
                wrong = first + int(differs.nonzero()[0].item())
                message = (
                    f"rank {rank.number}, group {group}, layer {layer}: {request_id} computes on "
                    f"at {start}, but its token {wrong} (block {blocks[wrong]}) has wrong bytes"
                )
                rank.wrong.setdefault(request_id, (int(blocks[wrong]), message))
                expected = ~expected
            self.checked_bytes += there.numel()
            pages[blocks[start:], :, places[start:]] = expected[layer, start:]


MakeWorld = Callable[..., World]
"""The fixture `make_world`: closes what it made."""


def scheduled(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """The step's requests, each with the tokens computed before and after it."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [
        (request_id, computed[request_id], computed[request_id] + count)
        for request_id, count in output.num_scheduled_tokens.items()
    ]


def failed_requests(request_ids: set[str]) -> dict[str, set[str]]:
    """The field of a worker's output that tells of failed loads, where vLLM has it."""
    known = "failed_recving" in KVConnectorOutput.__dataclass_fields__
    return {"failed_recving": request_ids} if known else {}


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(LLAMA["vocab_size"]) for _ in range(length)]
