# SPDX-License-Identifier: Apache-2.0
"""The connector that vLLM creates, once in its scheduler and once in every worker.

It translates vLLM's calls for a `RequestSide` or a `WorkerSide` of `flexkv.engine`, and catches
errors before they reach vLLM. Errors at start stop the engine on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)

from flexkv.engine.boundary import always, answers
from flexkv.engine.scheduler.side import RequestSide
from flexkv_vllm.compat.core import HybridConnector, hit_sources, warn_if_newer
from flexkv_vllm.compat.steps import read_step
from flexkv_vllm.events import BlockEvents
from flexkv_vllm.metrics import FlexKVPromMetrics, FlexKVStats
from flexkv_vllm.orders import StepMetadata, WorkerReport
from flexkv_vllm.pool import Pool
from flexkv_vllm.settings import (
    announcement_of,
    announces_prompts,
    flush_seconds,
    may_load_layerwise,
)
from flexkv_vllm.start_scheduler import make_request_side
from flexkv_vllm.weights import WeightWatch
from flexkv_vllm.worker_calls import WorkerCalls

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_OFF = "FlexKV finds, loads and stores nothing until the engine is restarted"

_R = TypeVar("_R")


def _off(answer: Callable[[FlexKVConnectorV1], _R]) -> Callable[..., _R]:
    """Answers in place of a scheduler side that may have lost track of what workers copy."""

    def turn_off(self: FlexKVConnectorV1, *_: object, **__: object) -> _R:
        if self._scheduler is not None:
            self._scheduler.turn_off()
        return answer(self)

    return turn_off


class FlexKVConnectorV1(WorkerCalls, KVConnectorBase_V1, HybridConnector):
    """vLLM's view of FlexKV. `KVConnectorBase_V1` documents when vLLM calls each method."""

    handle_preemptions = WorkerCalls.handle_preemptions  # vLLM 0.18 has another parameter

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: RequestSide[StepMetadata] | None = None
        self._events: BlockEvents | None = None
        self._weights: WeightWatch | None = None
        if role is KVConnectorRole.SCHEDULER and self._config.enable:
            warn_if_newer()
            self._announces = announces_prompts(vllm_config)
            self._scheduler, self._events = make_request_side(
                self._config,
                vllm_config,
                kv_cache_config,
                self._boundary,
                behind_shim=self._is_behind_shim,
            )
            self._weights = WeightWatch(self._weights_changed)

    @property
    def requires_kv_delivery(self) -> bool:
        # A cache delivers no KV to another engine: a lost block is a miss.
        return False

    # In the scheduler.

    @answers(always(None), "vLLM's prefix cache is not seen")
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            own = Pool(gpu_block_pool)
            self._scheduler.bind_pool(own, getattr(gpu_block_pool, "hash_block_size", 0))
            if self._events is not None:
                self._events.bind_pool(own)

    @answers(always(None), "it is fetched when it is scheduled")
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.queued(request)

    @answers(always((0, False)), "it is a miss")
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    @answers(_off(lambda _: None), _OFF)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @answers(lambda *_, **__: {}, "vLLM counts it as unspecified")
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        if self._scheduler is None:
            return {}
        return hit_sources(self._scheduler.hit_tokens(request, num_external_tokens))

    @answers(always(()), "vLLM computes the last window of a hit again")
    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        side = self._scheduler
        return () if side is None or side.is_off else tuple(side.cached_groups)

    @answers(_off(lambda self: self._last_orders()), _OFF)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.step(read_step(scheduler_output))

    def _last_orders(self) -> StepMetadata:
        return StepMetadata() if self._scheduler is None else self._scheduler.last_orders()

    @answers(_off(lambda _: None), _OFF)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            # `isinstance` of a subclass of vLLM's abstract class takes longer than the rest.
            ours = report if type(report) is WorkerReport else None
            self._scheduler.step_ended(ours, connector_output.invalid_block_ids)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request)

    def _finish(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """vLLM may give the request's blocks away: workers wait for the stores that read them."""
        announced = self._announce(request)
        self._end(request)
        return False, announced

    @answers(always(None), "another engine computes what it does not find")
    def _announce(self, request: Request) -> dict[str, Any] | None:
        """What the answer to a prefill request says to the engine that decodes it: how much of the
        prompt comes to a shared store. None if nothing does."""
        if self._scheduler is None or not self._announces(request):
            return None
        return announcement_of(self._scheduler.announced_tokens(request))

    @answers(_off(lambda _: None), _OFF)
    def _end(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.finished(request)

    @answers(always(False), "copies end in the steps of later requests")
    def has_pending_push_work(self) -> bool:
        if self._scheduler is None or self._scheduler.is_off:
            return False
        pending = self._events is not None and self._events.pending
        return pending or self._scheduler.wants_step

    @answers(lambda _: [], "they are told later, or lost")
    def take_events(self) -> Iterable[KVCacheEvent]:
        if self._events is None or self._scheduler is None or self._scheduler.is_off:
            return []
        return self._events.take()

    def reset_cache(self) -> bool:
        return self._weights is None or self._weights.reset(self._pause, self._reset)

    @answers(always(False), "all blocks are discarded")
    def _pause(self) -> bool:
        return self._scheduler is None or self._scheduler.pause()

    @answers(_off(lambda _: False), _OFF)
    def _reset(self, cause: str) -> bool:
        return self._scheduler is None or self._scheduler.reset(cause)

    @answers(_off(lambda _: None), _OFF)
    def _weights_changed(self, *, sure: bool) -> None:
        if self._scheduler is not None:
            self._scheduler.weights_changed(sure=sure)

    # On both sides.

    @answers(always(None), "the counts come later, or are lost")
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The counts since the last call; None if there are none."""
        side = self._worker or self._scheduler
        samples = side.figures.take() if side is not None and side.has_figures else None
        return FlexKVStats(data=samples) if samples else None

    def shutdown(self) -> None:
        """Leave the arena. Idempotent."""
        with self._boundary.guard("shutdown", "the kernel cleans up when the process ends"):
            if self._worker is not None:
                self._worker.close()
            if self._scheduler is not None:
                self._scheduler.close(flush_seconds(self._vllm_config))
        self._worker = self._scheduler = None

    # In the processes that log and serve metrics, without an instance.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # In a CUDA graph of the whole forward pass no layer can wait.
        return may_load_layerwise(extra_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return FlexKVStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return FlexKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
