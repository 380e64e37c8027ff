# SPDX-License-Identifier: Apache-2.0
"""FlexKV's private touches of vLLM: attributes that it reads, and methods that it replaces.

vLLM may change any of them without notice. Callers handle the names that a release lacks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig


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


def config_of_maker() -> Any:
    """vLLM's configuration, of the connector that is being made now; None without one. vLLM gives
    parts of its offloading an extract, which names neither weights nor most settings."""
    frame = inspect.currentframe()
    while frame is not None:
        local = frame.f_locals
        if isinstance(local.get("self"), KVConnectorBase_V1) and "vllm_config" in local:
            return local["vllm_config"]
        frame = frame.f_back
    return None


def keys_of(context: Any) -> Mapping[bytes, int]:
    """Tokens of a request before the end of each of its blocks, in order in each KV cache group,
    from an offloading manager's `ReqContext`. vLLM publishes single ones only; one question for all
    takes a tenth of the time."""
    positions: Mapping[bytes, int] = context._offload_key_positions
    return positions


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
