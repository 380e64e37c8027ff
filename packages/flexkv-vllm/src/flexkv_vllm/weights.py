# SPDX-License-Identifier: Apache-2.0
"""Says why vLLM resets a cache, and resets it where the weights of a running vLLM were replaced.

vLLM replaces weights by methods of its workers (`reload_weights`, `update_weights`, and those that
users add for reinforcement learning) or by functions that it applies to the model (`apply_model`),
and reports none of it to connectors. Each of these calls therefore counts as an exchange, but for
those known to be harmless. Nor does vLLM report that a LoRA adapter is loaded again from the same
path.

On the other hand, vLLM resets connectors at each pause and each sleep, after which the weights may
be what they were. `WeightWatch` tells these cases apart.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from flexkv.figures.counters import ResetCause
from flexkv_vllm.compat.patches import (
    call_after_adapter_loads,
    call_after_rpcs,
    call_at_new_weights,
    enclose_pauses,
)
from flexkv_vllm.keys import adapter_loaded

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("flexkv.vllm")

_PREPARATION = "init_weight_transfer_engine"
"""vLLM's method of workers that lets other programs change weights later, by other methods."""

_HARMLESS_NAMES = """
    check_health checkpoint_prepare checkpoint_restore compute_weight_checksums
    get_cache_block_size_bytes get_compilation_match_table get_encoder_timing_stats
    get_kv_cache_spec get_kv_connector_handshake_metadata get_model_inspection
    get_supported_kv_cache_layouts get_supported_tasks list_loras pin_lora profile
    release_late_interaction_query_cache reset_encoder_cache reset_mm_cache save_sharded_state
    save_tensorized_model shutdown_weight_transfer_engine supports_draft_weight_updates
    synchronize_device update_max_model_len
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""vLLM's methods of workers that neither change weights nor let others change them. All others may
do so."""

_USERS_HARMLESS = "keeps_weights_"
"""What names begin with of the methods by which a user extends workers without such effects."""

_pause: ContextVar[bool | None] = ContextVar("pause", default=None)
"""Whether the engine core that pauses just now has a process of its own; None if none pauses."""

_watches: weakref.WeakSet[WeightWatch] = weakref.WeakSet()
"""Those in use."""


class WeightWatch:
    """Knows why vLLM resets one cache, and resets the cache when weights may have changed: workers
    have run a method or a function that is not known to be harmless, or vLLM has loaded a LoRA
    adapter whose files have changed since its last load.

    Which engine of this process did so is not distinguished.

    A pause or a sleep keeps the blocks of an engine that nobody but vLLM can have given other
    weights. The first sign of a program that writes weights ends that for the rest of the engine's
    life. `discard`: a method of the cache's owner, which discards all blocks and does not raise. It
    is held weakly. Its keyword `sure` says whether nothing before may have changed weights without
    a sign, so that all blocks so far are of the weights of the model's files.
    """

    def __init__(self, discard: Callable[..., object]) -> None:
        self._discard = weakref.WeakMethod(discard)
        self._doubt = ""
        _watches.add(self)
        call_after_rpcs(_ran)
        call_after_adapter_loads(_loaded)
        enclose_pauses(_pausing)
        call_at_new_weights(_changed)

    def reset(self, keep: Callable[[], bool], discard: Callable[[str], bool]) -> bool:
        """Do what vLLM asks the connector for just now, and log it. Returns whether no outdated
        block can be found.

        Args:
            keep: called where the blocks stay. Returns whether that went well; if not, they are
                discarded.
            discard: called with the cause, one of `ResetCause`, where the blocks go. Returns
                whether they are gone.
        """
        alone = _pause.get()
        if alone is None:
            logger.info("FlexKV discards its blocks: a user reset vLLM's connectors")
            return discard(ResetCause.REQUEST)
        doubt = self._doubt or ("" if alone else "vLLM runs in the process of its user")
        if not doubt and keep():
            logger.info(
                "FlexKV keeps its blocks: vLLM pauses or sleeps, and nothing changed weights"
            )
            return True
        logger.info(
            "FlexKV discards its blocks: vLLM pauses or sleeps, and its weights may have changed "
            "without a sign: %s",
            doubt or "FlexKV failed to pause",
        )
        return discard(ResetCause.DOUBT)

    def doubt(self, why: str) -> None:
        """Discard all blocks at later pauses. `why`: what may change weights without a sign."""
        self._doubt = why

    def changed(self, why: str) -> None:
        """Discard all blocks now and at later pauses, because the weights have changed."""
        self.discard(why)
        self.doubt(why)

    def discard(self, why: str) -> None:
        """Discard all blocks. `why` is logged."""
        discard = self._discard()
        if discard is not None:
            logger.info("FlexKV discards its blocks: %s", why)
            discard(sure=not self._doubt)


@contextmanager
def _pausing(alone: bool) -> Iterator[None]:
    token = _pause.set(alone)
    try:
        yield
    finally:
        _pause.reset(token)


def _ran(method: object) -> None:
    """Workers have run a method, or a function, for a user. Unless it is known to be harmless, it
    counts as an exchange of weights."""
    # A function may have any name.
    known = method if isinstance(method, str) else ""
    if known in _HARMLESS or known.startswith(_USERS_HARMLESS):
        return
    # A `functools.partial` has no name.
    why = f"the workers of vLLM ran {known or getattr(method, '__name__', type(method).__name__)}"
    if known == _PREPARATION:
        for watch in list(_watches):
            watch.doubt(why)
    else:
        _changed(why)


def _loaded(adapter: LoRARequest) -> None:
    try:
        changed = adapter_loaded(adapter)
    except OSError:
        changed = True
    if changed:
        name, path = adapter.lora_name, adapter.lora_path
        for watch in list(_watches):
            watch.discard(f"vLLM loaded other weights of the LoRA adapter {name!r} from {path}")


def _changed(why: str) -> None:
    for watch in list(_watches):
        watch.changed(why)
