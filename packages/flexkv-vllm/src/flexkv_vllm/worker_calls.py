# SPDX-License-Identifier: Apache-2.0
"""The calls of vLLM's workers, behind the boundary for errors."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from flexkv.engine.boundary import ErrorBoundary, always, answers
from flexkv.engine.worker.worker import WorkerSide
from flexkv_vllm.compat.core import reports_sleep
from flexkv_vllm.compat.patches import connectors_here
from flexkv_vllm.orders import StepMetadata, WorkerReport
from flexkv_vllm.pages import Place
from flexkv_vllm.settings import read_settings
from flexkv_vllm.sleep import follow_sleep
from flexkv_vllm.start_worker import make_worker_side

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("flexkv.vllm")

_POLLING = "polling copies"
_DOUBT = "the loads that end with this step count as failed"
_STEP = ""
"""In place of a request's id, it stands for the loads that the step itself computes on."""


class WorkerCalls(KVConnectorBase_V1):
    """A worker's part of the connector. It does nothing in other processes, or if FlexKV is
    disabled.

    The start raises a `FlexKVError` with one clear message. All other calls return: a failure is
    logged once, counted, and a miss. Raises FlexKVError if a setting, vLLM's version or its
    parallel configuration is not allowed.
    """

    _is_behind_shim = False
    """Whether vLLM's own `FlexKVConnectorV1` calls this one."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = read_settings(vllm_config, type(self))
        self._boundary = ErrorBoundary()
        self._worker: WorkerSide | None = None
        # What each load fills, of those under way and of those that end with the running step.
        self._loading: dict[str, list[int]] = {}
        self._suspects: dict[str, list[int]] = {}
        self._doubtful = self._by_request = False
        # The orders of the running step, if no copy is under way and the step begins none.
        self._idle: StepMetadata | None = None
        if not self._config.enable:
            logger.info("FlexKV is turned off (ENABLE_FLEXKV or the setting 'enable')")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._config.enable:
            return
        self._worker = make_worker_side(
            self._config,
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            place=Place.here(),
            boundary=self._boundary,
            alone=connectors_here() == [self],
        )
        self._by_request = self._worker.fails_by_request
        if self._is_behind_shim or not reports_sleep():
            follow_sleep(self)

    @answers(always(None), "copies end, now and for good")
    def unregister_kv_caches(self) -> None:
        """vLLM is about to unmap its KV pages. Returns once no copy touches them."""
        if self._worker is not None:
            with self._boundary.guard("ending copies for a sleep", "copies end, now and for good"):
                self._worker.suspend()
                return
            self._worker.stop_copying()

    @answers(always(None), "nothing is loaded or stored")
    def restore_kv_caches(self) -> None:
        """vLLM has mapped its KV pages again."""
        if self._worker is not None:
            self._worker.resume()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Most steps fence nothing. This cannot fail.
        orders = kv_connector_metadata
        if self._worker is not None and isinstance(orders, StepMetadata) and orders.fences:
            self._fence(self._worker, orders)

    @answers(always(None), "copies end, now and for good")
    def _fence(self, worker: WorkerSide, orders: StepMetadata) -> None:
        with self._boundary.guard("fencing stores", "copies end, now and for good"):
            worker.fence(orders)
            return
        worker.stop_copying()

    @answers(lambda self, *_, **__: self._doubt_step(), _DOUBT)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._connector_metadata
        if self._worker is not None and isinstance(orders, StepMetadata):
            self._follow_loads(orders)
            if self._worker.rests(orders):
                self._idle = orders
                return
            with self._boundary.guard("starting loads", "they count as failed"):
                self._worker.start_loads(orders)
                return
            self._worker.fail_loads(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        # One call a layer, and mostly nothing to wait for. This cannot fail.
        if self._idle is None and self._worker is not None:
            self._wait_for_layer(self._worker, layer_name)

    @answers(lambda self, *_: self._doubt_step(), _DOUBT)
    def _wait_for_layer(self, worker: WorkerSide, layer_name: str) -> None:
        worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """FlexKV stores whole blocks, after the forward pass."""

    @answers(always(None), "the blocks are not cached")
    def wait_for_save(self) -> None:
        orders = self._connector_metadata
        if orders is self._idle:
            return
        if self._worker is not None and isinstance(orders, StepMetadata):
            with self._boundary.guard("starting stores", "the blocks are not cached"):
                self._worker.start_stores(orders)
                return
            self._worker.fail_stores(orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        _, received = self.get_finished(finished_req_ids)
        failed = set[str]() if self._idle is not None else self._take_failed_requests()
        return base.KVConnectorTransferResults(set(), received or set(), failed)

    @answers(lambda self, *_, **__: self._doubt_step() or (None, None), _DOUBT)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        orders, idle = self._connector_metadata, self._idle
        if orders is idle and idle is not None:
            self._worker.step_ended(idle)
            return None, None
        self._idle = None
        if not self._finished(self._worker, orders):
            return None, None
        received = self._worker.take_finished()
        for request_id in received:
            self._suspects[request_id] = self._loading.pop(request_id, [])
        return None, received or None

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
    def _take_failed_requests(self) -> set[str]:
        return set() if self._worker is None else self._worker.take_failed_requests()

    @answers(lambda self: self._suspected_blocks(), _DOUBT)
    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._worker is None or (self._idle is not None and not self._doubtful):
            return set()
        bad_blocks = self._worker.take_bad_blocks()
        return bad_blocks | self._suspected_blocks() if self._doubtful else bad_blocks

    @answers(always(None), "its end is seen later")
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        orders = self._connector_metadata
        if orders is self._idle:
            return None
        if self._worker is not None and isinstance(orders, StepMetadata):
            with self._boundary.guard("reporting a step", "its end is not measured"):
                report = self._worker.report(orders)
                if report is None:
                    return None
                return WorkerReport(report.number, report.load_rate, report.proves)
            return WorkerReport(0, 0.0, orders.proves)
        return None

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
