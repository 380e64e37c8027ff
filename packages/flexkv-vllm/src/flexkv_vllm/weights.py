# SPDX-License-Identifier: Apache-2.0
"""Tells caches that the weights of a running vLLM were replaced, so that they discard all blocks.

vLLM replaces weights by methods of its workers (`reload_weights`, `update_weights`, and those that
users add for reinforcement learning) or by functions that it applies to the model (`apply_model`),
and tells connectors nothing of it. Nor does it tell them that a LoRA adapter is loaded again from
the same path.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING

from flexkv_vllm.compat.patches import call_after_adapter_loads, call_after_rpcs
from flexkv_vllm.identity import adapter_loaded

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("flexkv.vllm")

_HARMLESS = frozenset(
    {"compute_weight_checksums", "init_weight_transfer_engine", "shutdown_weight_transfer_engine"}
)
"""vLLM's methods that are named after weights and change none."""


_LOADS = frozenset({"load_weights", "load_state_dict"})
"""Methods by which functions that vLLM applies to its model change weights."""

_discards: list[weakref.WeakMethod[Callable[[], object]]] = []


def watch_weights(discard: Callable[[], object]) -> None:
    """Call `discard` from now on when a method with `weight` in its name has run in the workers, or
    a function that loads weights, or vLLM has loaded a LoRA adapter whose files have changed since
    its last load.

    Which engine of this process ran it is not distinguished.

    Args:
        discard: a method of a cache, which discards all blocks and does not raise. It is held
            weakly: a cache that is gone is not called.
    """
    _discards.append(weakref.WeakMethod(discard))
    call_after_rpcs(_ran)
    call_after_adapter_loads(_loaded)


def _ran(method: str, arguments: Sequence[object]) -> None:
    changes = "weight" in method.lower() and method not in _HARMLESS
    if changes or any(_loads_weights(each) for each in arguments):
        _discard_all(f"the workers of vLLM ran {method}")


def _loads_weights(function: object) -> bool:
    """Whether an argument is a function that is named after weights, or loads them."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, FunctionType):
        return False
    named = "weight" in function.__name__.lower()
    return named or not _LOADS.isdisjoint(function.__code__.co_names)


def _loaded(adapter: LoRARequest) -> None:
    try:
        changed = adapter_loaded(adapter)
    except OSError:
        changed = True
    if changed:
        name, path = adapter.lora_name, adapter.lora_path
        _discard_all(f"vLLM loaded other weights of the LoRA adapter {name!r} from {path}")


def _discard_all(why: str) -> None:
    _discards[:] = [discard for discard in _discards if discard() is not None]
    for held in _discards:
        discard = held()
        if discard is not None:
            logger.info("FlexKV discards its blocks: %s", why)
            discard()
