# SPDX-License-Identifier: Apache-2.0
"""The part that both connectors share: the two sides, behind the boundary for errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flexkv.engine.boundary import always, answers
from flexkv.engine.scheduler.side import RequestSide
from flexkv.engine.scheduler.storing import StoreTime
from flexkv_vllm.compat.core import hit_sources, reports_sleep, warn_if_newer
from flexkv_vllm.compat.steps import read_step
from flexkv_vllm.events import BlockEvents
from flexkv_vllm.metrics import FlexKVStats
from flexkv_vllm.orders import StepMetadata, WorkerReport
from flexkv_vllm.pool import Pool
from flexkv_vllm.settings import (
    announcement_of,
    announces_prompts,
    flush_seconds,
    read_settings,
    report_ignored,
)
from flexkv_vllm.start_scheduler import make_request_side
from flexkv_vllm.worker_calls import WorkerCalls

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("flexkv.vllm")

_OFF = "FlexKV finds, loads and stores nothing until the engine is restarted"

_R = TypeVar("_R")


def _off(answer: Callable[[Adapter], _R]) -> Callable[..., _R]:
    """Answers in place of a scheduler side that may have lost track of what workers copy."""

    def turn_off(adapter: Adapter, *_: object, **__: object) -> _R:
        adapter.turn_off()
        return answer(adapter)

    return turn_off


class Adapter(WorkerCalls):
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
        hears_sleep = reports_sleep() and hasattr(connector, "unregister_kv_caches")
        config = read_settings(vllm_config, connector)
        super().__init__(vllm_config, config, hears_sleep=hears_sleep)
        self._store_time = store_time
        self._scheduler: RequestSide[StepMetadata] | None = None
        self._events: BlockEvents | None = None
        self._announces: Callable[[Request], bool] = lambda _: False
        if not self._config.enable:
            logger.info("FlexKV is turned off (ENABLE_FLEXKV or the setting 'enable')")

    @property
    def enabled(self) -> bool:
        """Whether the settings let FlexKV do anything."""
        return self._config.enable

    def start_scheduler(self, kv_cache_config: KVCacheConfig | None) -> None:
        if self._config.enable:
            warn_if_newer()
            report_ignored(self._config)
            self._announces = announces_prompts(self._vllm_config)
            self._scheduler, self._events = make_request_side(
                self._config, self._vllm_config, kv_cache_config, self._store_time, self._boundary
            )

    def shutdown(self) -> None:
        """Leave the arena. Idempotent."""
        with self._boundary.guard("shutdown", "the kernel cleans up when the process ends"):
            if self._worker is not None:
                self._worker.close()
            if self._scheduler is not None:
                self._scheduler.close(flush_seconds(self._vllm_config))
        self._worker = self._scheduler = None

    def turn_off(self) -> None:
        """See `RequestSide.turn_off`."""
        if self._scheduler is not None:
            self._scheduler.turn_off()

    def last_orders(self) -> StepMetadata:
        """See `RequestSide.last_orders`."""
        return StepMetadata() if self._scheduler is None else self._scheduler.last_orders()

    # Scheduler side.

    @answers(always(None), "vLLM's prefix cache is not seen")
    def bind_pool(self, pool: BlockPool) -> None:
        if self._scheduler is not None:
            own = Pool(pool)
            self._scheduler.bind_pool(own, getattr(pool, "hash_block_size", 0))
            if self._events is not None:
                self._events.bind_pool(own)

    @answers(always(None), "it is fetched when it is scheduled")
    def queued(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.queued(request)

    @answers(always((0, False)), "it is a miss")
    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, local_tokens)

    @answers(_off(lambda _: None), _OFF)
    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), tokens)

    @answers(_off(lambda self: self.last_orders()), _OFF)
    def build_orders(self, output: SchedulerOutput) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.step(read_step(output))

    @answers(_off(lambda _: None), _OFF)
    def step_ended(self, output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            report = output.kv_connector_worker_meta
            # `isinstance` of a subclass of vLLM's abstract class takes longer than the rest.
            ours = report if type(report) is WorkerReport else None
            self._scheduler.step_ended(ours, output.invalid_block_ids)

    @answers(always(None), "another engine computes what it does not find")
    def announce(self, request: Request) -> dict[str, Any] | None:
        """What the answer to a prefill request says to the engine that decodes it: how much of the
        prompt comes to a shared store. None if nothing does. Call it before `finished`."""
        if self._scheduler is None or not self._announces(request):
            return None
        return announcement_of(self._scheduler.announced_tokens(request))

    @answers(_off(lambda _: False), _OFF)
    def finished(self, request: Request, tables: Sequence[Sequence[int]]) -> bool:
        return self._scheduler is not None and self._scheduler.finished(request, tables)

    @answers(_off(lambda _: False), _OFF)
    def reset(self, cause: str = "request") -> bool:
        """See `RequestSide.reset`."""
        return self._scheduler is None or self._scheduler.reset(cause)

    @answers(always(False), "all blocks are discarded")
    def pause(self) -> bool:
        """See `RequestSide.pause`."""
        return self._scheduler is None or self._scheduler.pause()

    @answers(_off(lambda _: None), _OFF)
    def weights_changed(self, *, sure: bool) -> None:
        """See `RequestSide.weights_changed`."""
        if self._scheduler is not None:
            self._scheduler.weights_changed(sure=sure)

    @answers(always(()), "vLLM computes the last window of a hit again")
    def loaded_groups(self) -> tuple[int, ...]:
        """vLLM's numbers of the KV cache groups whose blocks are cached."""
        side = self._scheduler
        return () if side is None or side.is_off else tuple(side.cached_groups)

    @answers(lambda _: [], "they are told later, or lost")
    def take_events(self) -> list[KVCacheEvent]:
        if self._events is not None and self._scheduler is not None and not self._scheduler.is_off:
            with self._boundary.guard("telling events", "they are told later, or lost"):
                return self._events.take()
        return []

    @answers(lambda *_: {}, "vLLM counts it as unspecified")
    def hit_sources(self, request: Request, tokens: int) -> dict[Any, int]:
        if self._scheduler is None:
            return {}
        return hit_sources(self._scheduler.hit_tokens(request, tokens))

    @property
    def wants_step(self) -> bool:
        """Whether vLLM must step without requests, so that a copy ends or is reported, or so that
        all events are told."""
        return self._wants_step()

    @answers(always(False), "copies end in the steps of later requests")
    def _wants_step(self) -> bool:
        if self._scheduler is None or self._scheduler.is_off:
            return False
        pending = self._events is not None and self._events.pending
        return pending or self._scheduler.wants_step

    # Both sides.

    @answers(always(None), "the counts come later, or are lost")
    def take_stats(self) -> FlexKVStats | None:
        """The counts since the last call; None if there are none."""
        side = self._worker or self._scheduler
        if side is not None and side.has_figures:
            with self._boundary.guard("counting", "the counts come later, or are lost"):
                samples = side.figures.take()
                return FlexKVStats(data=samples) if samples else None
        return None
