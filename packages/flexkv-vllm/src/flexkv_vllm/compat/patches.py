# SPDX-License-Identifier: Apache-2.0
"""FlexKV's private touches of vLLM: attributes that it reads, and methods that it replaces.

vLLM may change any of them without notice. A method that a release lacks is not replaced.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.lora.request import LoRARequest


def _replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorate a function that vLLM calls from now on in place of a method. The function gets the
    method as its first argument. A second replacement changes nothing."""

    def decorate(replacement: Callable[..., Any]) -> None:
        method: Any = getattr(owner, name, None)
        if method is None or hasattr(method, "calls_flexkv"):
            return

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(method, *args, **kwargs)

        call.calls_flexkv = True  # type: ignore[attr-defined]
        setattr(owner, name, call)

    return decorate


def register_connector(name: str, module: str) -> None:
    """Register the class `name` of `module` with vLLM. It replaces a class of the same name.

    vLLM refuses a second registration, and may run plugins more than once in a process. A
    registered name is therefore removed from the registry first.
    """
    KVConnectorFactory._registry.pop(name, None)
    KVConnectorFactory.register_connector(name, module, name)


def call_when_choosing(check: Callable[[KVTransferConfig], None]) -> None:
    """Make vLLM call `check` whenever it looks for a connector's class. Errors of `check` reach
    vLLM."""

    @_replaces(KVConnectorFactory, "get_connector_class")
    def check_and_find(find_class: Any, kv_transfer_config: KVTransferConfig) -> Any:
        check(kv_transfer_config)
        return find_class(kv_transfer_config)


def call_at_configuration(
    report: Callable[[KVTransferConfig | None, KVTransferConfig | None], None],
) -> None:
    """Make vLLM call `report` with the configuration of the connector that the user gave, and with
    the one that vLLM uses: other flags may replace the connector. Either is None without a
    connector."""
    from vllm.config import VllmConfig

    @_replaces(VllmConfig, "_post_init_kv_transfer_config")
    def settle_and_report(settle: Any, self: VllmConfig) -> None:
        given = copy.deepcopy(self.kv_transfer_config)
        settle(self)
        report(given, self.kv_transfer_config)


def connectors_here() -> list[Any]:
    """The connectors of this worker: vLLM's outermost one, and those in a `MultiConnector`. The one
    behind vLLM's own `FlexKVConnectorV1` stands in place of that."""
    outermost: Any = get_kv_transfer_group()
    connectors = [outermost, *getattr(outermost, "_connectors", ())]
    return [getattr(each, "_flexkv_connector", each) for each in connectors]


def is_made_by_another() -> bool:
    """Whether a `MultiConnector` calls this now. It gives its connectors nothing that says so."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return any(isinstance(frame.f_locals.get("self"), MultiConnector) for frame in _callers())


def config_of_maker() -> Any:
    """vLLM's configuration, of the connector that is being made now; None without one. vLLM gives
    parts of its offloading an extract, which names neither weights nor most settings."""
    for frame in _callers():
        local = frame.f_locals
        if isinstance(local.get("self"), KVConnectorBase_V1) and "vllm_config" in local:
            return local["vllm_config"]
    return None


def _callers() -> Iterator[FrameType]:
    """The frames of this thread, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def keys_of(context: Any) -> Mapping[bytes, int]:
    """Tokens of a request before the end of each of its blocks, in order in each KV cache group,
    from an offloading manager's `ReqContext`. vLLM publishes single ones only; one question for all
    takes a tenth of the time."""
    positions: Mapping[bytes, int] = context._offload_key_positions
    return positions


_PASSED_ON = (
    "bind_gpu_block_pool",
    "build_connector_worker_meta",
    "handle_preemptions",
    "has_pending_push_work",
    "reset_cache",
)
"""What vLLM's own `FlexKVConnectorV1` does not forward by itself."""


def complete_shim() -> None:
    """Make vLLM's own `FlexKVConnectorV1` pass on what it does not. It delivers no KV to another
    engine: vLLM 0.27 or newer else discards what a step under way computes for a request that it
    preempts. Where memory is short, the same requests are then preempted and begun anew for ever.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import flexkv_connector

    def forward(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self._flexkv_connector, name)(*args, **kwargs)

    def register(self: Any, kv_caches: object) -> None:
        self._flexkv_connector.register_kv_caches(kv_caches, self._kv_cache_config)

    def bind(self: Any, metadata: KVConnectorMetadata) -> None:
        KVConnectorBase_V1.bind_connector_metadata(self, metadata)
        self._flexkv_connector.bind_connector_metadata(metadata)

    def clear(self: Any) -> None:
        KVConnectorBase_V1.clear_connector_metadata(self)
        self._flexkv_connector.clear_connector_metadata()

    connector: Any = flexkv_connector.FlexKVConnectorV1
    connector.requires_kv_delivery = False
    connector.register_kv_caches = register
    connector.bind_connector_metadata = bind
    connector.clear_connector_metadata = clear
    for name in _PASSED_ON:
        setattr(connector, name, forward(name))


def call_after_rpcs(after: Callable[[object], None]) -> None:
    """Make vLLM's engine core call `after` with each method of its workers, by name, and each
    function that it has had them run on behalf of a user. `after` runs on the scheduler's thread,
    between two steps, also if the method raised."""
    from vllm.v1.engine.core import EngineCore

    @_replaces(EngineCore, "collective_rpc")
    def call_and_tell(call_workers: Any, self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call_workers(self, method, *args, **kwargs)
        finally:
            after(method)


def enclose_pauses(enclose: Callable[[bool], AbstractContextManager[object]]) -> None:
    """Make vLLM's engine core enter `enclose` while it resets all caches because it pauses, sleeps
    or gives its KV memory back, and not because a user asked for the reset.

    The argument of `enclose` says whether the core has a process of its own: no code of a user can
    then write to the model but by a call of `collective_rpc`. A release of vLLM without the method
    resets no connector at such times.
    """
    from vllm.v1.engine import core

    @_replaces(core.EngineCore, "_reset_caches")
    def reset_enclosed(reset: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with enclose(isinstance(self, core.EngineCoreProc)):
            return reset(self, *args, **kwargs)


def call_at_new_weights(tell: Callable[[str], None]) -> None:
    """Make vLLM's engine core call `tell` with what it does, where that is a sign of new weights:
    it goes to sleep without its weights (level 2), or wakes its weights up alone, as trainers ask
    it to before they write them, or is given another version of its weights."""
    from vllm.v1.engine.core import EngineCore

    @_replaces(EngineCore, "sleep")
    def sleep_and_tell(sleep: Any, self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level > 1:
            tell(f"vLLM sleeps at level {level} and discards its weights")
        return sleep(self, level, *args, **kwargs)

    @_replaces(EngineCore, "wake_up")
    def wake_up_and_tell(wake_up: Any, self: Any, tags: list[str] | None = None) -> Any:
        woken = wake_up(self, tags)
        if "weights" in (tags or ()) and self.model_executor.is_sleeping:
            tell("vLLM woke its weights up alone, as for an update of them")
        return woken

    @_replaces(EngineCore, "set_weight_version")
    def set_version_and_tell(set_version: Any, self: Any, weight_version: str) -> Any:
        tell(f"vLLM was given version {weight_version!r} of its weights")
        return set_version(self, weight_version)


def call_around_sleep(suspend: Callable[[], None], resume: Callable[[], None]) -> None:
    """Make vLLM's worker of this process call `suspend` before it may unmap its KV pages, to sleep
    or to give their memory back, and `resume` once it has mapped them again. Neither may raise.
    Other kinds of workers unmap nothing.

    Before 0.26 vLLM unmaps pages without waiting for the device. Later releases wait for the work
    that the device has been given, but not for copies that it has yet to be given.
    """
    # The process of such a worker has imported its class before there are any pages.
    worker: Any = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)

    @_replaces(worker, "sleep")
    def suspend_and_sleep(sleep: Any, *args: Any, **kwargs: Any) -> Any:
        suspend()
        return sleep(*args, **kwargs)

    @_replaces(worker, "wake_up")
    def wake_up_and_resume(wake_up: Any, self: Any, tags: list[str] | None = None) -> Any:
        woken = wake_up(self, tags)
        if tags is None or "kv_cache" in tags:
            resume()
        return woken

    @_replaces(worker, "discard")
    def suspend_and_discard(discard: Any, self: Any, tags: tuple[str, ...]) -> Any:
        if "kv_cache" in tags:
            suspend()
        return discard(self, tags)


def call_after_adapter_loads(after: Callable[[LoRARequest], None]) -> None:
    """Make vLLM's engine core call `after` with each LoRA adapter that it has loaded on behalf of a
    user. `after` runs on the scheduler's thread, between two steps. If the load raised, vLLM keeps
    the weights that it had, and `after` is not called."""
    from vllm.v1.engine.core import EngineCore

    @_replaces(EngineCore, "add_lora")
    def load_and_tell(load: Any, self: Any, lora_request: LoRARequest) -> Any:
        loaded = load(self, lora_request)
        after(lora_request)
        return loaded
