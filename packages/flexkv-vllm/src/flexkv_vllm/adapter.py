# SPDX-License-Identifier: Apache-2.0
"""The part that both connectors share: the two sides, behind the boundary for errors."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flexkv.engine.boundary import ErrorBoundary, always, answers
from flexkv.engine.scheduler.fills import StoreTime
from flexkv.engine.worker.worker import WorkerSide
from flexkv_vllm.compat.core import hit_sources, warn_if_newer
from flexkv_vllm.metrics import FlexKVStats
from flexkv_vllm.orders import StepMetadata, WorkerReport
from flexkv_vllm.promises import Promises
from flexkv_vllm.scheduler_side import SchedulerSide
from flexkv_vllm.settings import flush_seconds, read_settings
from flexkv_vllm.stages import Place
from flexkv_vllm.start_scheduler import make_scheduler_side
from flexkv_vllm.start_worker import make_worker_side

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("flexkv.vllm")

_POLLING = "polling copies"
_OFF = "FlexKV finds, loads and stores nothing until the engine is restarted"
_DOUBT = "the loads that end with this step count as failed"
_STEP = ""
"""In place of a request's id, it stands for the loads that the step itself computes on."""

_R = TypeVar("_R")


def _off(answer: Callable[[], _R]) -> Callable[..., _R]:
    """Answers in place of a scheduler side that may have lost track of what workers copy: its cache
    is not polled any more, so no wrong byte is found."""

    def turn_off(adapter: Adapter, *_: object) -> _R:
        adapter.turn_off()
        return answer()

    return turn_off


class Adapter:
    """One process's part of FlexKV: a scheduler side, a worker side, or neither if disabled.

    `start_*` raise a `FlexKVError` with one clear message. All other methods return: a failure is
    logged once, counted, and a miss.

    Args:
        vllm_config: of the engine.
        store_time: when blocks are stored.
        connector: the class that uses this adapter, whose methods vLLM calls.

    Raises:
        FlexKVError: a setting, vLLM's version or its parallel configuration is not allowed.
    """

    def __init__(self, vllm_config: VllmConfig, store_time: StoreTime, connector: type) -> None:
        self._vllm_config = vllm_config
        self._store_time = store_time
        self._boundary = ErrorBoundary()
        self._config = read_settings(vllm_config, connector)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._ended: SchedulerSide | None = None
        self._promises = Promises()
        # What each load fills, of those under way and of those that end with the running step.
        self._loading: dict[str, list[int]] = {}
        self._suspects: dict[str, list[int]] = {}
        self._doubtful = self._by_request = False
        # The orders of the running step, if no copy is under way and the step begins none.
        self._idle: StepMetadata | None = None
        if not self._config.enable:
            logger.info("FlexKV is turned off (ENABLE_FLEXKV or the setting 'enable')")

    @property
    def enabled(self) -> bool:
        """Whether the settings let FlexKV do anything."""
        return self._config.enable

    def start_scheduler(self, kv_cache_config: KVCacheConfig | None) -> None:
        if self._config.enable:
            warn_if_newer()
            self._scheduler = make_scheduler_side(
                self._config, self._vllm_config, kv_cache_config, self._store_time, self._boundary
            )
            self._promises = Promises(*self._scheduler.reported_group)

    def start_worker(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        kv_cache_config: KVCacheConfig | None,
        place: Place,
        *,
        alone: bool,
    ) -> None:
        """`alone`: whether no other connector copies into the engine's blocks or out of them."""
        if self._config.enable:
            self._worker = make_worker_side(
                self._config,
                self._vllm_config,
                kv_cache_config,
                kv_caches,
                place=place,
                boundary=self._boundary,
                alone=alone,
            )
            self._by_request = self._worker.fails_by_request

    def shutdown(self) -> None:
        """Leave the arena. Idempotent."""
        with self._boundary.guard("shutdown", "the kernel cleans up when the process ends"):
            if self._worker is not None:
                self._worker.close()
            scheduler = self._scheduler or self._ended
            if scheduler is not None:
                scheduler.close(flush_seconds(self._vllm_config), off=self._scheduler is None)
                scheduler.log_counters(self._boundary.failures)
        self._worker = self._scheduler = self._ended = None

    def turn_off(self) -> None:
        """Do nothing more in the scheduler's process, apart from ending what vLLM waits for."""
        self._ended, self._scheduler = self._scheduler or self._ended, None

    # Scheduler side.

    @answers(always(None), "vLLM's prefix cache is not seen")
    def bind_pool(self, pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_pool(pool)

    @answers(always(None), "it is fetched when it is scheduled")
    def queued(self, request: Request) -> None:
        if self._scheduler is not None:
            with self._boundary.guard("prefetching", "it is fetched when it is scheduled"):
                self._scheduler.queued(request)

    @answers(always((0, False)), "it is a miss")
    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is not None:
            answer: tuple[int | None, bool] = 0, False
            with self._boundary.guard("lookup", "it is a miss"):
                answer = self._scheduler.match(request, local_tokens)
            if answer[0] or self._promises.loads:
                self._promises.matched(request, local_tokens, answer)
            return answer
        return 0, False

    @answers(_off(lambda: None), _OFF)
    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        if self._scheduler is None:
            return
        self._promises.allocated(request, blocks, tokens)
        with self._boundary.guard("ordering a load", "vLLM is told that it failed"):
            self._scheduler.allocated(request, blocks, tokens)
            return
        self._scheduler.refuse(request, blocks, tokens)

    @answers(lambda self, _: self.turn_off() or self._promises.orders_after_all(), _OFF)
    def build_orders(self, output: SchedulerOutput) -> StepMetadata:
        if self._scheduler is None:
            return self._promises.orders_after_all()
        orders = None
        with self._boundary.guard(
            "building a step's orders", "no more is stored of the requests that run"
        ):
            orders = self._scheduler.build_orders(output)
        if orders is None:
            self._scheduler.lose_track()
            orders = self._scheduler.take_orders(output)
        if self._promises.loads or orders.releases:
            self._promises.ordered(orders)
        return orders

    @answers(_off(lambda: None), _OFF)
    def step_ended(self, output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        if output.invalid_block_ids:
            self._distrust(self._scheduler, output.invalid_block_ids)
        with self._boundary.guard("ending a step", "copies that ended are seen later"):
            report = output.kv_connector_worker_meta
            # `isinstance` of a subclass of vLLM's abstract class takes longer than the rest.
            self._scheduler.step_ended(report if type(report) is WorkerReport else None)

    @answers(_off(lambda: False), _OFF)
    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> bool:
        if self._scheduler is None:
            return False
        holds = None
        with self._boundary.guard("ending a request", "its last blocks are not cached"):
            holds = self._scheduler.finished(request, tables)
        if holds is None:
            holds = self._scheduler.forget(request.request_id)
        self._promises.ended(request.request_id, holds)
        return holds

    @answers(_off(lambda: False), _OFF)
    def reset(self, cause: str = "request") -> bool:
        """Discard all blocks. `cause`: see `KVCache.clear`. Returns whether that succeeded."""
        return self._scheduler is None or self._reset_by(partial(self._scheduler.reset, cause))

    @answers(always(False), "all blocks are discarded")
    def pause(self) -> bool:
        """vLLM pauses and keeps its weights. Returns whether all went well."""
        if self._scheduler is None:
            return True
        with self._boundary.guard("pausing", "all blocks are discarded"):
            self._scheduler.pause()
            return True
        return False

    @answers(_off(lambda: None), _OFF)
    def weights_changed(self) -> None:
        if self._scheduler is not None:
            self._reset_by(self._scheduler.weights_changed)

    @answers(always(()), "vLLM computes the last window of a hit again")
    def loaded_groups(self) -> tuple[int, ...]:
        return () if self._scheduler is None else self._scheduler.loaded_groups

    @answers(lambda _: [], "they are told later, or lost")
    def take_events(self) -> list[KVCacheEvent]:
        if self._scheduler is not None and self._scheduler.tells_events:
            with self._boundary.guard("telling events", "they are told later, or lost"):
                return self._scheduler.take_events()
        return []

    @answers(lambda *_: {}, "vLLM counts it as unspecified")
    def hit_sources(self, request: Request, tokens: int) -> dict[Any, int]:
        if self._scheduler is None:
            return {}
        with self._boundary.guard("telling where a hit came from", "vLLM counts it as unspecified"):
            return hit_sources(self._scheduler.hit_tokens(request, tokens))
        return {}

    @property
    def wants_step(self) -> bool:
        return self._wants_step()

    @answers(always(False), "copies end in the steps of later requests")
    def _wants_step(self) -> bool:
        return self._scheduler is not None and self._scheduler.wants_step

    def _distrust(self, scheduler: SchedulerSide, invalid: set[int]) -> None:
        with self._boundary.guard("discarding wrong blocks", "all blocks are discarded"):
            scheduler.distrust(invalid)
            return
        self.weights_changed()

    def _reset_by(self, reset: Callable[[], None]) -> bool:
        assert self._scheduler is not None
        self._scheduler.suspend()
        with self._boundary.guard("reset", "nothing is loaded or stored until one succeeds"):
            reset()
            return True
        return False

    # Both sides.

    @answers(always(None), "the counts come later, or are lost")
    def take_stats(self) -> FlexKVStats | None:
        """The counts since the last call; None if there are none."""
        side = self._worker or self._scheduler
        if side is not None and side.figures.active and side.has_figures:
            with self._boundary.guard("counting", "the counts come later, or are lost"):
                samples = side.figures.take()
                return FlexKVStats(data=samples) if samples else None
        return None

    # Worker side.

    @answers(always(None), "copies end, now and for good")
    def fence(self, metadata: KVConnectorMetadata | None) -> None:
        if self._worker is not None and isinstance(metadata, StepMetadata) and metadata.fences:
            with self._boundary.guard("fencing stores", "copies end, now and for good"):
                self._worker.fence(metadata)
                return
            self._worker.stop_copying()

    @answers(lambda self, _: self._doubt_step(), _DOUBT)
    def start_loads(self, metadata: KVConnectorMetadata | None) -> None:
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._follow_loads(metadata)
            if self._worker.rests(metadata):
                self._idle = metadata
                return
            with self._boundary.guard("starting loads", "they count as failed"):
                self._worker.start_loads(metadata)
                return
            self._worker.fail_loads(metadata)

    @answers(lambda self, _: self._doubt_step(), _DOUBT)
    def wait_for_layer(self, layer: str) -> None:
        if self._worker is not None and self._idle is None:
            self._worker.wait_for_layer(layer)

    @answers(always(None), "the blocks are not cached")
    def start_stores(self, metadata: KVConnectorMetadata | None) -> None:
        if metadata is self._idle:
            return
        if self._worker is not None and isinstance(metadata, StepMetadata):
            with self._boundary.guard("starting stores", "the blocks are not cached"):
                self._worker.start_stores(metadata)
                return
            self._worker.fail_stores(metadata)

    @answers(lambda self, _: self._doubt_step() or (None, None), _DOUBT)
    def get_finished(
        self, metadata: KVConnectorMetadata | None
    ) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        idle = self._idle
        if metadata is idle and idle is not None:
            self._worker.step_ended(idle)
            return None, None
        self._idle = None
        if not self._finished(self._worker, metadata):
            return None, None
        sent, received = self._worker.take_finished()
        for request_id in received:
            self._suspects[request_id] = self._loading.pop(request_id, [])
        return sent or None, received or None

    def _finished(self, worker: WorkerSide, metadata: KVConnectorMetadata | None) -> bool:
        """Look for the ends of copies. Returns whether vLLM gets those that were found."""
        orders = metadata if isinstance(metadata, StepMetadata) else StepMetadata()
        if self._boundary.lasts(_POLLING):
            self._boundary.gave_up(_POLLING, "all loads and stores of this rank fail")
            worker.give_up(orders)
            return True
        with self._boundary.guard(_POLLING, "they are polled in the next step"):
            worker.finished(orders)
            return True
        worker.poll_later(orders)
        return False

    @answers(lambda self: self._suspects.keys() - {_STEP}, _DOUBT)
    def take_failed_requests(self) -> set[str]:
        if self._worker is None or self._idle is not None:
            return set()
        return self._worker.take_failed_requests()

    @answers(always(None), "its end is seen later")
    def step_report(self, metadata: KVConnectorMetadata | None) -> WorkerReport | None:
        if metadata is self._idle:
            return None
        if self._worker is not None and isinstance(metadata, StepMetadata):
            with self._boundary.guard("reporting a step", "its end is not measured"):
                report = self._worker.report(metadata)
                if report is None:
                    return None
                return WorkerReport(report.number, report.load_rate, report.proves)
            return WorkerReport(0, 0.0, metadata.proves)
        return None

    @answers(lambda self: self._suspected_blocks(), _DOUBT)
    def take_bad_blocks(self) -> set[int]:
        if self._worker is None or (self._idle is not None and not self._doubtful):
            return set()
        bad_blocks = self._worker.take_bad_blocks()
        return bad_blocks | self._suspected_blocks() if self._doubtful else bad_blocks

    def _follow_loads(self, orders: StepMetadata) -> None:
        """A step begins with these orders."""
        self._idle = None
        self._doubtful = False
        self._suspects.clear()
        if orders.layerwise or orders.unfilled:
            layerwise = (order.engine_blocks for order in orders.layerwise)
            self._suspects[_STEP] = [*orders.unfilled, *itertools.chain.from_iterable(layerwise)]
        for request_id, order in orders.loads.items():
            self._loading.setdefault(request_id, []).extend(order.engine_blocks)
        for request_id, blocks in orders.failed_loads.items():
            self._loading.setdefault(request_id, []).extend(blocks)

    def _doubt_step(self) -> None:
        """It is unknown how the loads of this step have ended."""
        self._doubtful = True

    def _suspected_blocks(self) -> set[int]:
        """The blocks of all loads that end with this step. Where they mean nothing to vLLM, it has
        the requests instead."""
        if self._by_request:
            return set()
        return set(itertools.chain.from_iterable(self._suspects.values()))
