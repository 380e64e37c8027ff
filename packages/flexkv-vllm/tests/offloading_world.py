# SPDX-License-Identifier: Apache-2.0
"""The engine without a model under vLLM's own `OffloadingConnector`, both sides of it real, with
FlexKV's spec. Models may have two KV cache groups: full attention and a sliding window, one layer
each, in the same memory."""

from __future__ import annotations

import copy
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine_world import EventRecorder, World, scheduled
from kv_pages import BLOCK_TOKENS, HEAD_BYTES, HEADS, LAYERS, heads_of, make_pages, token_bytes
from late_mover import LateMover
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager
from world_config import PLUGIN, disk_settings, make_config

from flexkv_vllm.offloading.worker import GroupMover

SPEC = {"spec_name": "FlexKVOffloadingSpec", "spec_module_path": "flexkv_vllm.offloading"}


@dataclass(slots=True)
class OffloadingRank:
    """One worker: its KV pages, its connector, and its copy of the block tables by group."""

    number: int
    connector: OffloadingConnector
    pages: dict[str, torch.Tensor]
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    wrong: dict[str, Any] = field(default_factory=dict)

    @property
    def worker(self) -> Any:
        connector_worker = self.connector.connector_worker
        assert connector_worker is not None
        return connector_worker.worker

    def slow_down(
        self, rng: random.Random, polls: tuple[int, int], failure_rate: float
    ) -> list[LateMover]:
        """Put late movers before this rank's."""
        late: dict[Any, LateMover] = {}
        groups = []
        for group in self.worker._groups:
            if group.mover not in late:
                late[group.mover] = LateMover(group.mover, rng, polls, failure_rate)
            groups.append(GroupMover(late[group.mover], group.block_bytes))
        self.worker._groups = groups
        return list(late.values())


class OffloadingWorld(World):
    """As `World`. `window` makes the last layer one of a sliding window of so many tokens, in a
    group of its own; `chunk` are vLLM's blocks of a FlexKV block."""

    def __init__(
        self,
        directory: Path,
        *,
        num_blocks: int = 64,
        slots: int = 64,
        ranks: int = 1,
        chunk: int = 1,
        window: int | None = None,
        budget: int = 128,
        policy: str = "recompute",
        max_requests: int = 8,
        lag: random.Random | None = None,
        disk_slots: int = 0,
        settings: dict[str, Any] | None = None,
        events: bool = False,
    ) -> None:
        layers = LAYERS if window is None else 1
        slot_bytes = 4096 * -(-chunk * BLOCK_TOKENS * HEAD_BYTES * HEADS * layers // 4096)
        self.vllm_config = make_config(
            directory,
            slots * slot_bytes,
            ranks=ranks,
            entry=PLUGIN,
            block_tokens=BLOCK_TOKENS,
            budget=budget,
            policy=policy,
            max_requests=max_requests,
            async_scheduling=lag is not None,
            events=events,
        )
        self.vllm_config.parallel_config.world_size = ranks
        self.vllm_config.cache_config.num_gpu_blocks = num_blocks
        self.vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=str(uuid.uuid4()),
            kv_load_failure_policy=policy,
            kv_connector_extra_config={
                **SPEC,
                "blocks_per_chunk": chunk,
                "offload_prompt_only": False,
                "cpu_cache_gb": slots * slot_bytes / (1 << 30),
                "runtime_dir": str(directory / "run"),
                "copy_threads": 2,
                **disk_settings(directory, disk_slots, slot_bytes),
                **(settings or {}),
            },
        )
        self.lag = lag
        self.steps = deque()
        self.num_blocks = num_blocks
        self.window = window
        kv_cache_config = make_groups(num_blocks, ranks, window)
        self.layers = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        self.offloading_ranks = start_ranks(self.vllm_config, kv_cache_config, ranks)
        self.ranks = self.offloading_ranks  # type: ignore[assignment]
        scheduler_class: Any = self.vllm_config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler_class(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.recorder = EventRecorder()
        self.scheduler.kv_event_publisher = self.recorder
        self.requests = {}
        self.weights = b""
        self.stats = []
        self.aggregator = KVOutputAggregator(ranks)
        hash_fn = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        self.texts = {}
        self.outputs = {}
        self.external_tokens = {}
        self.preemptions = 0
        self.checked_bytes = 0

    @property
    def manager(self) -> Any:
        return self.connector.connector_scheduler.manager

    @property
    def cache(self) -> Any:
        return self.manager._cache

    def slow_down(
        self,
        rng: random.Random,
        polls: tuple[int, int] = (0, 6),
        failure_rate: float = 0.0,
    ) -> list[LateMover]:
        return [
            late
            for rank in self.offloading_ranks
            for late in rank.slow_down(rng, polls, failure_rate)
        ]

    def settle(self) -> None:
        """Until no copy and no disk operation is under way."""
        while self.cache.busy:
            self.cache.poll()

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in reversed(self.offloading_ranks):
            rank.connector.shutdown()

    def _run_rank(self, rank: Any, output: SchedulerOutput) -> ModelRunnerOutput:
        connector = rank.connector
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
        metadata = copy.deepcopy(output.kv_connector_metadata)
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        self._follow_tables(rank, output)
        for request_id, start, end in scheduled(output):
            self._forward(rank, request_id, start, end)
        context: Any = None
        connector.start_load_kv(context)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        request_ids = [request_id for request_id, _, _ in scheduled(output)]
        told = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[[] for _ in request_ids],
            kv_connector_output=KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            ),
        )
        connector.clear_connector_metadata()
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        return told

    def _follow_tables(self, rank: Any, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            rank.tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            rank.tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                rank.tables[request_id] = [[] for _ in self.layers]
            for table, blocks in zip(rank.tables[request_id], groups or (), strict=False):
                table.extend(blocks)

    def _forward(self, rank: Any, request_id: str, start: int, end: int) -> None:
        heads = heads_of(rank.number, len(self.ranks))
        expected = token_bytes(self.texts[request_id].upto(end), self.weights)[:, :, heads]
        positions = torch.arange(end)
        places = positions % BLOCK_TOKENS
        for group, (names, ids) in enumerate(
            zip(self.layers, rank.tables[request_id], strict=True)
        ):
            blocks = torch.tensor(ids, dtype=torch.int64)[positions // BLOCK_TOKENS]
            first = max(0, start - self.window + 1) if self.window and group else 0
            for name in names:
                layer, pages = int(name.removeprefix("layer")), rank.pages[name]
                there = pages[blocks[first:start], :, places[first:start]]
                if not torch.equal(there, expected[layer, first:start]):
                    wrong = (there != expected[layer, first:start]).flatten(1).any(dim=1)
                    token = first + int(wrong.nonzero()[0])
                    raise AssertionError(
                        f"rank {rank.number}, {name}: {request_id} computes on at {start}, but "
                        f"its token {token} (block {blocks[token]}) has wrong bytes"
                    )
                self.checked_bytes += there.numel()
                pages[blocks[start:], :, places[start:]] = expected[layer, start:]


MakeOffloadingWorld = Callable[..., OffloadingWorld]
"""The fixture `make_offloading_world`: closes what it made."""


def make_groups(num_blocks: int, ranks: int, window: int | None) -> KVCacheConfig:
    """The layers' pages as `make_pages` makes them: K and V of a token and head, 8 bytes each."""
    traits: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": max(1, HEADS // ranks),
        "head_size": HEAD_BYTES // 2,
        "dtype": torch.int8,
    }
    names = [f"layer{i}" for i in range(LAYERS)]
    groups = [KVCacheGroupSpec(names, FullAttentionSpec(**traits))]
    if window is not None:
        sliding = SlidingWindowSpec(**traits, sliding_window=window)
        groups = [
            KVCacheGroupSpec(names[:-1], FullAttentionSpec(**traits)),
            KVCacheGroupSpec(names[-1:], sliding),
        ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def start_ranks(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, ranks: int
) -> list[OffloadingRank]:
    """Workers that have met. One after another, as vLLM's current configuration is one for a
    process: only rank 0 waits for the others, in a thread."""
    made = []
    for number in range(ranks):
        own = copy.deepcopy(vllm_config)
        own.parallel_config.rank = number
        pages = make_pages(kv_cache_config.num_blocks, ranks)
        if len(kv_cache_config.kv_cache_groups) > 1:
            pages = dict.fromkeys(pages, pages["layer0"])
        connector = OffloadingConnector(own, KVConnectorRole.WORKER, kv_cache_config)
        made.append(OffloadingRank(number, connector, pages))
    with set_current_vllm_config(vllm_config):
        threads = [
            threading.Thread(target=rank.connector.register_kv_caches, args=(rank.pages,))
            for rank in made
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return made
