# SPDX-License-Identifier: Apache-2.0
"""The calls of a worker of vLLM, behind the boundary for errors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary, always, answers
from flexkv.engine.worker.worker import WorkerSide
from flexkv_vllm.orders import StepMetadata, WorkerReport
from flexkv_vllm.sleep import follow_sleep
from flexkv_vllm.stages import Place
from flexkv_vllm.start_worker import make_worker_side

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig

_POLLING = "polling copies"
_DOUBT = "the loads that end with this step count as failed"
_STEP = ""
"""In place of a request's id, it stands for the loads that the step itself computes on."""


class WorkerCalls:
    """A worker's part of FlexKV; nothing in other processes, or if FlexKV is disabled.

    `start_worker` raises a `FlexKVError` with one clear message. All other methods return: a
    failure is logged once, counted, and a miss.

    Args:
        vllm_config: of the engine.
        config: FlexKV's settings.
        hears_sleep: whether vLLM itself calls `suspend` and `resume`.
    """

    def __init__(self, vllm_config: VllmConfig, config: CacheConfig, *, hears_sleep: bool) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._hears_sleep = hears_sleep
        self._boundary = ErrorBoundary()
        self._worker: WorkerSide | None = None
        # What each load fills, of those under way and of those that end with the running step.
        self._loading: dict[str, list[int]] = {}
        self._suspects: dict[str, list[int]] = {}
        self._doubtful = self._by_request = False
        # The orders of the running step, if no copy is under way and the step begins none.
        self._idle: StepMetadata | None = None

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
            if not self._hears_sleep:
                follow_sleep(self)

    @answers(always(None), "copies end, now and for good")
    def suspend(self) -> None:
        """vLLM is about to unmap its KV pages. Returns once no copy touches them."""
        if self._worker is not None:
            with self._boundary.guard("ending copies for a sleep", "copies end, now and for good"):
                self._worker.suspend()
                return
            self._worker.stop_copying()

    @answers(always(None), "nothing is loaded or stored")
    def resume(self) -> None:
        """vLLM has mapped its KV pages again."""
        if self._worker is not None:
            self._worker.resume()

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
