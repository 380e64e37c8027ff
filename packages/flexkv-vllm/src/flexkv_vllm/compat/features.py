# SPDX-License-Identifier: Apache-2.0
"""Checks whether an untested vLLM has all features that the adapter uses.

`nox -s compat-newest` checks more, including types, but runs no engine and needs the network. This
check runs at the engine's start, in milliseconds, and decides whether FlexKV serves a newer
release.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from itertools import chain

_SCHEDULING = "vllm.v1.core.sched.output"

FIELDS = {
    (_SCHEDULING, "SchedulerOutput"): (
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
        "total_num_scheduled_tokens",
    ),
    (_SCHEDULING, "NewRequestData"): ("block_ids", "req_id"),
    (_SCHEDULING, "CachedRequestData"): ("new_block_ids", "req_ids", "resumed_req_ids"),
    ("vllm.v1.outputs", "KVConnectorOutput"): ("kv_connector_worker_meta",),
    ("vllm.v1.request", "Request"): (
        "all_token_ids",
        "block_hashes",
        "kv_transfer_params",
        "lora_request",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "request_id",
        "skip_reading_prefix_cache",
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): ("get_block_ids",),
    ("vllm.v1.core.block_pool", "BlockPool"): ("cached_block_hash_to_block",),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): ("kv_cache_groups",),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): ("kv_cache_spec", "layer_names"),
}
"""Fields that the adapter reads, by module and class."""

CALLS = {
    ("vllm.v1.core.block_pool", "BlockPool.evict_blocks"): 1,
    ("vllm.v1.core.block_pool", "BlockPool.get_cached_block"): 2,
    ("vllm.v1.engine.core", "EngineCore.collective_rpc"): 1,
    ("vllm.distributed.parallel_state", "get_pp_group"): 0,
    ("vllm.distributed.parallel_state", "get_tp_group"): 0,
    ("vllm.distributed.utils", "get_pp_indices"): 3,
}
"""Functions and methods that the adapter calls, and with how many positional arguments."""


_CALLED_IF_KNOWN = frozenset({"unregister_kv_caches", "restore_kv_caches"})
"""Methods of the connector that FlexKV can do without: `reports_sleep`."""


def missing_features(ours: type) -> list[str]:
    """Features that FlexKV uses and the installed vLLM lacks, or has with another signature; empty
    if vLLM has all. `ours` is FlexKV's class, whose base class in vLLM says what vLLM calls."""
    return [*_missing_fields(), *_misfit_calls(), *_misfit_methods(ours)]


def _missing_fields() -> Iterator[str]:
    for (module, name), fields in FIELDS.items():
        owner = _find(module, name)
        if owner is None:
            yield f"{module}.{name}"
            continue
        known = _fields_of(owner)
        yield from (f"{module}.{name}.{field}" for field in fields if field not in known)


def _fields_of(owner: Callable[..., object]) -> set[str]:
    """Attributes of an object of this class: of the class, or set by its constructor."""
    known = set(dir(owner)) | set(getattr(owner, "__dataclass_fields__", ()))
    constructor = getattr(owner, "__init__", None)
    code = getattr(inspect.unwrap(constructor) if constructor else None, "__code__", None)
    return known | set(code.co_names if code else ())


def _misfit_calls() -> Iterator[str]:
    for (module, name), count in CALLS.items():
        function = _find(module, name)
        if function is None:
            yield f"{module}.{name}"
            continue
        arguments = [None] * (count + name.count("."))  # a method takes its object first
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            yield f"{module}.{name} with {count} arguments ({error})"


def _misfit_methods(ours: type) -> Iterator[str]:
    """Methods of `ours` that do not accept vLLM's calls of its base class."""
    abstract: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset())
    yield from (f"an answer to {name}" for name in sorted(abstract))
    own = [each for each in ours.__mro__ if each.__module__.startswith("flexkv_vllm.")]
    bases = [each for each in ours.__mro__ if each not in own]
    theirs = bases[0]
    for name, answer in chain.from_iterable(vars(each).items() for each in own):
        if name.startswith("_") or not inspect.isfunction(answer):
            continue
        call = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if call is None and name not in _CALLED_IF_KNOWN:
            yield f"{theirs.__name__}.{name}"
        elif inspect.isfunction(call) and not _answers(answer, call):
            yield f"{theirs.__name__}.{name}{inspect.signature(call)}"


def _answers(ours: Callable[..., object], theirs: Callable[..., object]) -> bool:
    """Whether a call that fits `theirs` fits `ours`, by position and by name."""
    kinds = inspect.Parameter
    named = [
        parameter
        for parameter in inspect.signature(theirs).parameters.values()
        if parameter.kind in {kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY}
    ]
    signature = inspect.signature(ours)
    try:
        signature.bind(**{parameter.name: None for parameter in named})
        signature.bind(*(None for each in named if each.kind is kinds.POSITIONAL_OR_KEYWORD))
    except TypeError:
        return False
    return True


def _find(module: str, name: str) -> Callable[..., object] | None:
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found if callable(found) else None
