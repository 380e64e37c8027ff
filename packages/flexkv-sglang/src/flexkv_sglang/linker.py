# SPDX-License-Identifier: Apache-2.0
"""SGLang's external linker: its KV pool above FlexKV's host memory, without its own host tier.

SGLang creates a linker in each scheduler, and its radix tree looks prefixes up there. This module
has SGLang's types and calls; `side` does the work. After the start nothing here raises.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from flexkv import ConfigError, LayoutError
from flexkv.settings import configure_logging
from flexkv_sglang import hooks
from flexkv_sglang.compat import check_version, sglang_version
from flexkv_sglang.copies import LayerCounter
from flexkv_sglang.metrics import Metrics
from flexkv_sglang.pages import draft_of, pages_of
from flexkv_sglang.ranks import ranks_of, together
from flexkv_sglang.settings import engines_of, read_settings, report_ignored, share_of_engine
from flexkv_sglang.slots import DeviceSlots
from flexkv_sglang.start import Engine, start_rank
from flexkv_sglang.support import check_cache, check_settings, load_page_hash

logger = logging.getLogger("flexkv.sglang")

_READING = "reading SGLang's page numbers"

FLUSH_SECONDS = 2.5
"""How long blocks may still be written to lower tiers when SGLang ends on its own."""


class FlexKVLinker(UnifiedCacheLinker):
    """FlexKV behind SGLang's interface, which documents the methods.

    Borrows SGLang's pools and streams. Owns its side of the cache, its stream and its metrics.
    Raises FlexKVError if a setting, SGLang's version, its configuration or its pools are not
    allowed, or another rank cannot start.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        ranks = ranks_of(params.attn_tp_cache_group or params.tp_cache_group, params.pp_cache_group)
        with together(ranks):
            config = read_settings(extra_config or {})
            if not config.enable:
                raise ConfigError(
                    "enable is False (ENABLE_FLEXKV); allowed with FlexKV's linker: True"
                )
            configure_logging(config)
            load_page_hash()
            settings, model = resolving_view(server_args), model_config_of(server_args)
            version = sglang_version()
            check_version(config.allow_untested_engine, version)
            check_settings(settings)
            check_cache(components, params)
            pool = params.token_to_kv_pool_allocator.get_kvcache()
            draft = draft_of(server_args, settings, params)
            pages = pages_of(pool, params, model, draft, ranks.count // ranks.stages)
            engines = engines_of(settings)
            window = int(params.swa_retain_window or 0) if pages.windows else 0
            engine = Engine(
                settings,
                model,
                version,
                params.page_size,
                bool(params.is_eagle),
                engines,
                draft,
                window,
            )
            if ranks.rank == 0:
                report_ignored(config)  # the parts below are not the user's
            config = share_of_engine(config, engines)
        self.forward_stream = forward_stream
        self._page_size: int = params.page_size
        self.pools = {PoolName.KV: getattr(pool, "full_kv_pool", pool)}
        if pages.windows:
            self.pools[PoolName.SWA] = pool.swa_kv_pool
        if pages.states:
            self.pools[PoolName.MAMBA] = params.req_to_token_pool.mamba_pool
        self.side = start_rank(config, engine, pages, ranks)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with together(ranks):
                backup = getattr(settings, "enable_weights_cpu_backup", False)
                self.side.weights_return = bool(backup)
                counter = LayerCounter(pages.layers, self.side.wait_for_layer)
                self.layer_done_counter = counter
                if pages.states:
                    params.req_to_token_pool.register_layer_transfer_counter(counter)
                device = next(iter(pages.tensors.values())).device
                self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
                self._numbers = DeviceSlots(device)
                self._metrics = Metrics(config, _metric_labels(), leads=self.side.leads)
                if params.enable_kv_cache_events:
                    self.side.watch()
                hooks.serve(self.side)
                self._metrics.report(self.side)  # so that all values exist from the start
            undo.pop_all()

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        with self.side.boundary.guard("lookup", "it is a miss", loses=False):
            return self.side.lookup(rid, _by_pool(transfers)[0].keys)
        # The other ranks wait for the exchange that follows.
        return []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        hashes, last = self._hashes(transfers)
        return self.side.load(rid, hashes, self._pages(transfers), last)

    def cancel_queued_load(self, rid: str) -> bool:
        return self.side.cancel(rid)

    def start_layer_wise_loading(self) -> int:
        return self.side.start_batch(self._after_forward)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.side.finish_batch()

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        pages_of = partial(self._pages, transfers)
        hashes, last = self._hashes(transfers)
        self.side.offload(hashes, pages_of, self._after_forward, last)
        return True

    def num_completed_offloads(self) -> int:
        ended = self.side.ended_offloads()
        self._metrics.report(self.side)
        return ended

    def pop_completed_offload(self) -> bool:
        # SGLang offers a page again at its next use if it does not count as stored. The order of
        # uses is then known for all pages, and so is a state that a stored prefix has got since.
        offered_again = self.side.delays or self.side.trailing.have_states
        return self.side.take_offload() and not offered_again

    def reset(self) -> None:
        self.side.reset()

    def close(self) -> None:
        hooks.leave(self.side)
        self.side.close(FLUSH_SECONDS)

    def _hashes(self, transfers: list[PoolTransfer]) -> tuple[list[str], dict[str, int]]:
        """Hashes of the pages of transfers, and how many of the last have a page in pools apart, by
        the pool's name; none after an error."""
        with self.side.boundary.guard(_READING, "neither load nor store", loses=False):
            full, apart = _by_pool(transfers)
            return full.keys, {name: len(each.keys) for name, each in apart.items()}
        return [], {}

    def _pages(self, transfers: list[PoolTransfer]) -> list[int] | None:
        """The blocks of transfers' pages, read from the device; None after an error, or if these
        are not whole pages. All ranks get the same pages, because their allocators run in step."""
        with self.side.boundary.guard(_READING, "neither load nor store", loses=False):
            full, apart = _by_pool(transfers)
            size = self._page_size
            pools = [(full.slots, size)]
            for name, each in apart.items():
                pools.append((each.slots, 1 if name == PoolName.MAMBA.value else size))
            read = self._numbers.read(pools)
            named = [full.keys, *(each.keys for each in apart.values())]
            if read is None or [*map(len, read)] != [*map(len, named)]:
                return None
            return read[0] + self.side.trailing.blocks_of(dict(zip(apart, read[1:], strict=True)))
        return None

    def _after_forward(self) -> AbstractContextManager[object]:
        """A context in which copies wait for all work that SGLang has queued on the device: that
        work may still write stored pages, or read the former contents of loaded pages."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if self.forward_stream is not None:
            self._stream.wait_stream(self.forward_stream)
        after: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return after


def _metric_labels() -> dict[str, str] | None:
    """SGLang's own labels of this engine's metrics; None if SGLang serves no metrics."""
    observability, parallel = get_observability(), get_parallel()
    if not observability.enable_metrics:
        return None
    labels = {"model_name": str(get_serving().served_model_name)}
    if parallel.dp_rank is not None:
        labels["dp_rank"] = str(parallel.dp_rank)
    others = observability.extra_metric_labels or {}
    return labels | {name: str(value) for name, value in others.items()}


class _Named(NamedTuple):
    """Pages of one of SGLang's pools: their hashes, and their slots, a 1-D integer tensor; empty if
    SGLang asks what there is."""

    keys: list[str]
    slots: torch.Tensor


def _by_pool(transfers: Sequence[PoolTransfer]) -> tuple[_Named, dict[str, _Named]]:
    """The pages of full attention, and what the last of these have in pools apart, by the pool's
    name."""
    none = torch.arange(0)
    by_name = {
        str(each.name.value): _Named(
            each.keys or [], none if each.device_indices is None else each.device_indices
        )
        for each in transfers
    }
    full = by_name.pop(str(PoolName.KV.value), None)
    names = (str(each.value) for each in (PoolName.SWA, PoolName.MAMBA))
    apart = {name: by_name.pop(name) for name in names if name in by_name}
    if by_name or full is None:
        named = ", ".join(str(each.name.value) for each in transfers)
        raise LayoutError(f"SGLang names pages of {named}; allowed: kv, with swa or mamba")
    for name, each in apart.items():
        if each.keys != full.keys[-len(each.keys) :]:
            raise LayoutError(
                f"SGLang names {len(each.keys)} pages of {name} that are not the last of "
                f"{len(full.keys)} pages; allowed: those"
            )
    return full, apart
