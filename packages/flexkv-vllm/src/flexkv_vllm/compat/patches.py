# SPDX-License-Identifier: Apache-2.0
"""FlexKV's private touches of vLLM: attributes that it reads, and methods that it replaces.

vLLM may change any of them without notice. Callers handle the names that a release lacks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from flexkv_vllm.compat.core import fails_by_request

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def register_connector(name: str, module: str) -> None:
    """Register the class `name` of `module` with vLLM. It replaces a class of the same name.

    vLLM refuses a second registration, and may run plugins more than once in a process. A
    registered name is therefore removed from the registry first.
    """
    KVConnectorFactory._registry.pop(name, None)
    KVConnectorFactory.register_connector(name, module, name)


def call_when_choosing(check: Callable[[KVTransferConfig], None]) -> None:
    """Make vLLM call `check` whenever it looks for a connector's class. Errors of `check` reach
    vLLM. Idempotent."""
    find_class = KVConnectorFactory.get_connector_class
    if getattr(find_class, "checks_flexkv", False):
        return

    def check_and_find(kv_transfer_config: KVTransferConfig) -> Any:
        check(kv_transfer_config)
        return find_class(kv_transfer_config)

    check_and_find.checks_flexkv = True  # type: ignore[attr-defined]
    KVConnectorFactory.get_connector_class = check_and_find


def call_at_configuration(
    report: Callable[[KVTransferConfig | None, KVTransferConfig | None], None],
) -> None:
    """Make vLLM call `report` with the configuration of the connector that the user gave, and with
    the one that vLLM uses: other flags may replace the connector. Either is None without a
    connector. A release without the method never calls `report`. Idempotent."""
    from vllm.config import VllmConfig

    settle: Any = getattr(VllmConfig, "_post_init_kv_transfer_config", None)
    if settle is None or hasattr(settle, "__wrapped__"):
        return

    @functools.wraps(settle)
    def settle_and_report(self: VllmConfig) -> None:
        given = copy.deepcopy(self.kv_transfer_config)
        settle(self)
        report(given, self.kv_transfer_config)

    VllmConfig._post_init_kv_transfer_config = settle_and_report


def connectors_here() -> list[Any]:
    """The connectors of this worker: vLLM's outermost one, and those in a `MultiConnector`."""
    outermost: Any = get_kv_transfer_group()
    return [outermost, *getattr(outermost, "_connectors", ())]


def is_made_by_another() -> bool:
    """Whether a `MultiConnector` calls this now. It gives its connectors nothing that says so."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), MultiConnector):
            return True
        frame = frame.f_back
    return False


def implementation_of(connector: Any) -> object:
    """The object that vLLM's own `FlexKVConnectorV1` forwards to; None for other connectors."""
    return getattr(connector, "_flexkv_connector", None)


def complete_shim() -> None:
    """Make vLLM's own `FlexKVConnectorV1` answer what it does not pass on: it delivers no KV to
    another engine, its workers report ended steps, vLLM shows it its blocks, and vLLM steps at rest
    until FlexKV has reported all.

    vLLM 0.27 or newer else discards what a step under way computes for a request that it preempts.
    Where memory is short, the same requests are then preempted and begun anew for ever.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import flexkv_connector

    connector: Any = flexkv_connector.FlexKVConnectorV1
    connector.requires_kv_delivery = False
    connector.build_connector_worker_meta = lambda self: (
        self._flexkv_connector.build_connector_worker_meta()
    )
    connector.has_pending_push_work = lambda self: self._flexkv_connector.has_pending_push_work()
    connector.bind_gpu_block_pool = lambda self, pool: self._flexkv_connector.bind_gpu_block_pool(
        pool
    )


def step_metadata(connector: KVConnectorBase_V1) -> KVConnectorMetadata | None:
    """The orders of the running step, which vLLM has bound to a connector."""
    return connector._connector_metadata


def kv_cache_config_of(connector: KVConnectorBase_V1) -> KVCacheConfig | None:
    """The configuration with which vLLM created a connector."""
    return connector._kv_cache_config


def request_of_load(connector: OffloadingConnector, job_id: int) -> str:
    """The id of the request of a load. `connector` is vLLM's offloading connector on this rank."""
    worker = connector.connector_worker
    assert worker is not None  # it ordered the load
    request_id = worker._load_jobs[job_id]
    assert request_id is not None  # from 0.33 on, None stands for loads that vLLM itself waits for
    return str(request_id)


def answer_bad_blocks(connector: Any, take: Callable[[], set[int]]) -> None:
    """Make an offloading connector report, as blocks that loads did not fill, those of `take`."""
    connector.get_block_ids_with_load_errors = take


def offloading_connector_of(worker: object) -> OffloadingConnector | None:
    """The offloading connector of this process that has `worker`; None before vLLM has registered
    the connector."""
    for connector in connectors_here():
        ours = getattr(connector, "connector_worker", None)
        if ours is not None and ours.worker is worker:
            found: OffloadingConnector = connector
            return found
    return None


def answer_stats(connector: Any, take: Callable[[], Any]) -> None:
    """Make an offloading connector report the statistics of `take` together with its own."""
    ask = connector.get_kv_connector_stats

    def stats() -> Any:
        theirs, ours = ask(), take()
        return ours if theirs is None else theirs if ours is None else theirs.aggregate(ours)

    connector.get_kv_connector_stats = stats


def answer_failed_requests(connector: Any, take: Callable[[], set[str]]) -> None:
    """Make an offloading connector (vLLM 0.30 or newer) report, as requests whose loads failed,
    those of `take` too."""
    ask = connector.get_transfer_results

    def transfer_results(finished_req_ids: set[str]) -> Any:
        results = ask(finished_req_ids)
        results.failed_recving |= take()
        return results

    connector.get_transfer_results = transfer_results


def offer_only_what_was_computed() -> None:
    """Make vLLM's offloading connector offer only wholly computed blocks of ended requests.

    Up to 0.29, vLLM counts the last token of an answer as computed, but no step has computed its
    KV. Up to 0.26, vLLM also counts all tokens of an aborted request; if those have no blocks, the
    engine ends. From 0.30 on, where workers can name failed requests, vLLM counts as this function
    does.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    connector: Any = scheduler.OffloadingConnectorScheduler
    count = connector._calc_num_offloadable_tokens
    if fails_by_request() or hasattr(count, "__wrapped__"):
        return

    @functools.wraps(count)
    def count_computed(self: Any, req_status: Any, num_computed_tokens: int) -> Any:
        request = req_status.req
        if request.is_finished():
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            num_computed_tokens = min(num_computed_tokens, computed)
        return count(self, req_status, num_computed_tokens)

    connector._calc_num_offloadable_tokens = count_computed


class ConnectorCalls(Protocol):
    """FlexKV's part in calls of the scheduler side of vLLM's offloading connector that its manager
    does not see. None of them may raise."""

    def match(
        self,
        request: Request,
        groups: Sequence[tuple[int, Sequence[bytes], int, int | None]],
        local_tokens: int,
        limit: int,
        ask: Callable[[], tuple[int | None, bool]],
    ) -> tuple[int | None, bool]:
        """vLLM's connector looks for the hit of a request.

        Args:
            request: vLLM's request.
            groups: for each KV cache group its number, the keys of the request's complete blocks,
                tokens of a block, and how many blocks a hit needs of it; None for all.
            local_tokens: tokens that vLLM has itself.
            limit: tokens before the last block that vLLM may look up.
            ask: makes vLLM's connector look, and returns its answer.

        Returns:
            The answer for vLLM's scheduler.
        """
        ...

    def allocated(self, request: Request, tokens: int) -> None:
        """vLLM gave blocks to a request, and loads as many tokens into them."""
        ...

    def finished(self, request: Request) -> None:
        """A request has ended. vLLM tells its manager with the next step; 0.26 has done so."""
        ...

    def bound(
        self,
        vllm_config: Any,
        hash_tokens: int,
        groups: Sequence[tuple[int, int, int | None]],
        pool: Any,
        kv_cache_config: Any,
    ) -> None:
        """vLLM's scheduler is about to begin.

        Args:
            vllm_config: its configuration.
            hash_tokens: tokens of a hash.
            groups: number, tokens of a block, and window in blocks of each KV cache group; None for
                all blocks. Empty if this release has them elsewhere.
            pool: vLLM's own prefix cache.
            kv_cache_config: the configuration of the groups; None if this release has it elsewhere.
        """
        ...

    def step_begins(self, output: SchedulerOutput) -> None:
        """vLLM has scheduled a step."""
        ...

    def step_ended(self, output: KVConnectorOutput, side: Any) -> None:
        """The results of a step have come. vLLM takes them in next. `side` is for
        `blocks_of_requests` and `drop_from_prefix_cache`."""
        ...


def follow_connector(calls_of: Callable[[object], ConnectorCalls | None]) -> None:
    """Make the scheduler side of vLLM's offloading connector pass its calls on, and publish the
    events of its manager as they are.

    `calls_of` returns what to call for a manager; None for managers of other specs. A second call
    changes nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    side: Any = scheduler.OffloadingConnectorScheduler
    match, allocate = side.get_num_new_matched_tokens, side.update_state_after_alloc
    build, update = side.build_connector_meta, side.update_connector_output
    finish, take_events = side.request_finished, side.take_events
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(match)
    def follow_match(self: Any, request: Any, num_computed_tokens: int, *a: Any, **k: Any) -> Any:
        def ask() -> tuple[int | None, bool]:
            answer: tuple[int | None, bool] = match(self, request, num_computed_tokens, *a, **k)
            return answer

        calls = calls_of(self.manager)
        if calls is None:
            return ask()
        most = next(iter((*a, *k.values())), None)  # `max_num_new_tokens`, since 0.30
        groups, limit = _groups_of_request(self, request, num_computed_tokens, most)
        return calls.match(request, groups, num_computed_tokens, limit, ask)

    @functools.wraps(allocate)
    def follow_allocation(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        allocate(self, request, blocks, num_external_tokens)
        calls = calls_of(self.manager)
        if calls is not None:
            calls.allocated(request, num_external_tokens)

    @functools.wraps(finish)
    def follow_finish(self: Any, request: Any) -> Any:
        answer = finish(self, request)
        calls = calls_of(self.manager)
        if calls is not None:
            calls.finished(request)
        return answer

    @functools.wraps(build)
    def follow_step(self: Any, scheduler_output: Any) -> Any:
        calls = calls_of(self.manager)
        if calls is not None:
            calls.step_begins(scheduler_output)
        return build(self, scheduler_output)

    @functools.wraps(update)
    def follow_end(self: Any, connector_output: Any) -> Any:
        calls = calls_of(self.manager)
        if calls is not None:
            calls.step_ended(connector_output, self)
        return update(self, connector_output)

    @functools.wraps(take_events)
    def take_whole(self: Any) -> Any:
        if calls_of(self.manager) is None:
            return take_events(self)
        tracker = getattr(self, "_events_tracker", None)  # since 0.28
        if tracker is not None:
            tracker.reset()  # nothing else empties what it notes
        return self.manager.take_events()

    def bind_pool(self: Any, pool: Any) -> None:
        side = self.connector_scheduler
        side.flexkv_pool = pool
        calls = calls_of(side.manager)
        if calls is not None:
            kv_cache_config = getattr(self, "_kv_cache_config", None)
            calls.bound(self._vllm_config, *_groups_of(side), pool, kv_cache_config)

    side.get_num_new_matched_tokens, side.update_state_after_alloc = follow_match, follow_allocation
    side.build_connector_meta, side.update_connector_output = follow_step, follow_end
    side.request_finished, side.take_events = follow_finish, take_whole
    connector: Any = offloading_connector.OffloadingConnector
    connector.bind_gpu_block_pool = bind_pool


def _groups_of(side: Any) -> tuple[int, list[tuple[int, int, int | None]]]:
    """Tokens of a hash, and the groups, for `ConnectorCalls.bound`."""
    try:
        return side.config.tokens_per_hash, [
            (each.group_idx, each.tokens_per_chunk, each.sliding_window_size_in_chunks)
            for each in side.config.kv_group_configs
        ]
    except AttributeError:
        return 0, []


def _groups_of_request(
    side: Any, request: Any, local_tokens: int, most: int | None
) -> tuple[list[tuple[int, Sequence[bytes], int, int | None]], int]:
    """The groups and the limit for `ConnectorCalls.match`. No groups, if this release has the
    blocks of requests elsewhere: each of them is then looked up by itself."""
    limit: int = request.num_tokens
    try:
        status = side._req_status[request.request_id]
        status.update_offload_keys()
        groups = [
            (
                config.group_idx,
                state.offload_keys,
                config.tokens_per_chunk,
                config.sliding_window_size_in_chunks,
            )
            for config, state in zip(side.config.kv_group_configs, status.group_states, strict=True)
        ]
        caps = [most, getattr(status, "max_load_tokens", None)]
        # The blocks of a draft model are looked up a block further.
        further = max(tokens for _, _, tokens, _ in groups)
    except (AttributeError, KeyError, TypeError, ValueError):
        return [], limit
    return groups, min([limit, *(local_tokens + cap + further for cap in caps if cap is not None)])


def blocks_of_requests(side: Any) -> dict[str, list[Sequence[int]]] | None:
    """By request, its blocks in each KV cache group, as the scheduler side of vLLM's offloading
    connector has them. None if this release has them elsewhere."""
    try:
        return {
            request_id: [group.block_ids for group in status.group_states]
            for request_id, status in side._req_status.items()
        }
    except AttributeError:
        return None


def drop_from_prefix_cache(side: Any, blocks: set[int]) -> None:
    """Take blocks out of vLLM's own prefix cache, if vLLM has shown it to the connector."""
    pool = getattr(side, "flexkv_pool", None)
    if pool is not None:
        pool.evict_blocks(blocks)


def call_after_rpcs(after: Callable[[object], None]) -> None:
    """Make vLLM's engine core call `after` with each method of its workers, by name, and each
    function that it has had them run on behalf of a user. `after` runs on the scheduler's thread,
    between two steps, also if the method raised. A second call changes nothing."""
    from vllm.v1.engine.core import EngineCore

    call_workers: Any = EngineCore.collective_rpc
    if hasattr(call_workers, "__wrapped__"):
        return

    @functools.wraps(call_workers)
    def call_and_tell(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call_workers(self, method, *args, **kwargs)
        finally:
            after(method)

    EngineCore.collective_rpc = call_and_tell


def enclose_pauses(enclose: Callable[[bool], AbstractContextManager[object]]) -> None:
    """Make vLLM's engine core enter `enclose` while it resets all caches because it pauses, sleeps
    or gives its KV memory back, and not because a user asked for the reset.

    The argument of `enclose` says whether the core has a process of its own: no code of a user can
    then write to the model but by a call of `collective_rpc`. A release of vLLM without the method
    resets no connector at such times. A second call changes nothing.
    """
    from vllm.v1.engine import core

    engine: Any = core.EngineCore
    reset = getattr(engine, "_reset_caches", None)
    if reset is None or hasattr(reset, "__wrapped__"):
        return

    @functools.wraps(reset)
    def reset_enclosed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with enclose(isinstance(self, core.EngineCoreProc)):
            return reset(self, *args, **kwargs)

    engine._reset_caches = reset_enclosed


def call_at_new_weights(tell: Callable[[str], None]) -> None:
    """Make vLLM's engine core call `tell` with what it does, where that is a sign of new weights:
    it goes to sleep without its weights (level 2), or wakes its weights up alone, as trainers ask
    it to before they write them, or is given another version of its weights. A second call changes
    nothing."""
    from vllm.v1.engine.core import EngineCore

    engine: Any = EngineCore
    sleep, wake_up = engine.sleep, engine.wake_up
    set_version = getattr(engine, "set_weight_version", None)
    if hasattr(sleep, "__wrapped__"):
        return

    @functools.wraps(sleep)
    def sleep_and_tell(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level > 1:
            tell(f"vLLM sleeps at level {level} and discards its weights")
        return sleep(self, level, *args, **kwargs)

    @functools.wraps(wake_up)
    def wake_up_and_tell(self: Any, tags: list[str] | None = None) -> Any:
        woken = wake_up(self, tags)
        if "weights" in (tags or ()) and self.model_executor.is_sleeping:
            tell("vLLM woke its weights up alone, as for an update of them")
        return woken

    engine.sleep, engine.wake_up = sleep_and_tell, wake_up_and_tell
    if set_version is None:  # before vLLM had versions of weights
        return

    @functools.wraps(set_version)
    def set_version_and_tell(self: Any, weight_version: str) -> Any:
        tell(f"vLLM was given version {weight_version!r} of its weights")
        return set_version(self, weight_version)

    engine.set_weight_version = set_version_and_tell


def call_around_sleep(suspend: Callable[[], None], resume: Callable[[], None]) -> None:
    """Make vLLM's worker of this process call `suspend` before it may unmap its KV pages, to sleep
    or to give their memory back, and `resume` once it has mapped them again. Neither may raise.
    Other kinds of workers unmap nothing. A second call changes nothing.

    Before 0.26 vLLM unmaps pages without waiting for the device. Later releases wait for the work
    that the device has been given, but not for copies that it has yet to be given.
    """
    # The process of such a worker has imported its class before there are any pages.
    worker: Any = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    if worker is None or hasattr(worker.sleep, "__wrapped__"):
        return
    sleep, wake_up = worker.sleep, worker.wake_up
    discard = getattr(worker, "discard", None)  # from 0.31 on

    @functools.wraps(sleep)
    def suspend_and_sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        suspend()
        return sleep(self, *args, **kwargs)

    @functools.wraps(wake_up)
    def wake_up_and_resume(self: Any, tags: list[str] | None = None) -> Any:
        woken = wake_up(self, tags)
        if tags is None or "kv_cache" in tags:
            resume()
        return woken

    worker.sleep, worker.wake_up = suspend_and_sleep, wake_up_and_resume
    if discard is None:
        return

    @functools.wraps(discard)
    def suspend_and_discard(self: Any, tags: tuple[str, ...]) -> Any:
        if "kv_cache" in tags:
            suspend()
        return discard(self, tags)

    worker.discard = suspend_and_discard


def call_after_adapter_loads(after: Callable[[LoRARequest], None]) -> None:
    """Make vLLM's engine core call `after` with each LoRA adapter that it has loaded on behalf of a
    user. `after` runs on the scheduler's thread, between two steps. If the load raised, vLLM keeps
    the weights that it had, and `after` is not called. A second call changes nothing."""
    from vllm.v1.engine.core import EngineCore

    load: Any = EngineCore.add_lora
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_and_tell(self: Any, lora_request: LoRARequest) -> Any:
        loaded = load(self, lora_request)
        after(lora_request)
        return loaded

    EngineCore.add_lora = load_and_tell
