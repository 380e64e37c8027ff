# SPDX-License-Identifier: Apache-2.0
"""The engine without a model under vLLM's own `OffloadingConnector`, both sides of it real, with
FlexKV's spec."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_world import World, run_together
from kv_pages import BLOCK_TOKENS, make_pages
from ranks import LOADS_FIRST, Rank, ended_transfers, step_result
from texts import Text
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from world_config import OFFLOADING

from flexkv.figures.definitions import sample
from flexkv_vllm.metrics import PREFIX
from flexkv_vllm.offloading.spec import IdleManager
from flexkv_vllm.offloading.worker import GroupMover
from packages.inside import cache_of
from packages.inside_adapters import assert_manager_at_rest, jobs_of, poll_side, replace_groups
from packages.late_mover import LateMover


@dataclass(slots=True, kw_only=True)
class OffloadingRank(Rank):
    """A rank with vLLM's connector."""

    connector: OffloadingConnector

    @property
    def worker(self) -> Any:
        connector_worker = self.connector.connector_worker
        assert connector_worker is not None
        return connector_worker.worker

    def wait_for_layer(self, name: str) -> None:
        """vLLM's connector loads before the forward."""

    def run(
        self, output: SchedulerOutput, texts: Mapping[str, Text], weights: bytes
    ) -> ModelRunnerOutput:
        connector = self.connector
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
        metadata = copy.deepcopy(output.kv_connector_metadata)
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        self.follow_tables(output)
        context: Any = None
        if LOADS_FIRST:
            connector.start_load_kv(context)
        self.forward(output, texts, weights)
        if not LOADS_FIRST:
            connector.start_load_kv(context)
        if self.saves_idle or output.total_num_scheduled_tokens:
            connector.wait_for_save()
        ended = ended_transfers(connector, output.finished_req_ids)
        bad_blocks = connector.get_block_ids_with_load_errors()
        # The connector never loads beside the forward of the request, but another one may.
        for block, message in self.wrong.values():
            assert block in bad_blocks, message
        result = step_result(
            output,
            **ended,
            invalid_block_ids=bad_blocks,
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        return result

    def slow_down(
        self, rng: random.Random, polls: tuple[int, int], failure_rate: float
    ) -> list[LateMover]:
        late: dict[Any, LateMover] = {}

        def slow(group: GroupMover) -> GroupMover:
            if group.mover not in late:
                late[group.mover] = LateMover(group.mover, rng, polls, failure_rate)
            return GroupMover(late[group.mover], group.block_bytes)

        replace_groups(self.worker, slow)
        return list(late.values())

    def assert_at_rest(self) -> None:
        assert self.worker.get_finished() == []
        assert jobs_of(self.worker) == {}

    def shutdown(self) -> None:
        self.connector.shutdown()


class OffloadingWorld(World):
    """As `World`; `chunk` are vLLM's blocks of a FlexKV block."""

    def __init__(self, directory: Path, *, chunk: int = 1, **options: Any) -> None:
        super().__init__(directory, entry=OFFLOADING, block_tokens=chunk * BLOCK_TOKENS, **options)

    def collected(self) -> Counter[str]:
        """Sums of all samples of FlexKV's that vLLM was given, without histograms."""
        self.settle()
        self.step()
        total: Counter[str] = Counter()
        for stats in self.stats:
            told: Any = stats
            for name, by_labels in told["data"].items():
                if name.startswith(PREFIX):
                    for labels, value in by_labels.items():
                        if not isinstance(value, list):
                            total[sample(name.removeprefix(PREFIX), *labels)] += value
        return total

    @property
    def side(self) -> Any:
        """None: no `RequestSide` follows the requests."""
        return None

    def _start_ranks(self, ranks: int, kv_cache_config: KVCacheConfig) -> Sequence[Rank]:
        """One after another, as vLLM's current configuration is one for a process: only rank 0
        waits for the others, in a thread."""
        made = []
        for number in range(ranks):
            own = copy.deepcopy(self.vllm_config)
            own.parallel_config.rank = number
            pages = make_pages(self.num_blocks, ranks, 1 + len(self.windows))
            connector = OffloadingConnector(own, KVConnectorRole.WORKER, kv_cache_config)
            made.append(OffloadingRank(number, ranks, self.windows, pages, connector=connector))
        with set_current_vllm_config(self.vllm_config):
            run_together(
                [lambda rank=rank: rank.connector.register_kv_caches(rank.pages) for rank in made]
            )
        return made

    @property
    def manager(self) -> Any:
        return self.connector.connector_scheduler.manager

    @property
    def may_reset_connector(self) -> bool:
        """vLLM fails if copies are to end with the next step, after an abort or another reset."""
        return not getattr(self.connector.connector_scheduler, "_current_batch_jobs_to_flush", ())

    @property
    def cache(self) -> Any:
        return cache_of(self.manager)

    @property
    def is_on(self) -> bool:
        return not isinstance(self.manager, IdleManager)

    def poll(self) -> None:
        poll_side(self.manager)

    def assert_untracked(self) -> None:
        assert_manager_at_rest(self.manager)
        for rank in self.ranks:
            rank.assert_at_rest()


MakeOffloadingWorld = Callable[..., OffloadingWorld]
"""The fixture `make_offloading_world`: closes what it made."""
