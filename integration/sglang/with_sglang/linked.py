# SPDX-License-Identifier: Apache-2.0
"""SGLang's own tree, pool and requests above FlexKV's linker, on one rank; without an engine."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_requests import Grammars  # type: ignore[import-not-found]
from sglang_world import PATIENCE_SECONDS, Rank  # type: ignore[import-not-found]

from flexkv_sglang import hooks
from flexkv_sglang.copies import LayerCounter
from flexkv_sglang.linker import FlexKVLinker
from flexkv_sglang.ranks import Ranks
from flexkv_sglang.slots import DeviceSlots

PAGE, LAYERS = 4, 2
_POOL_PAGES = 32


class LinkedRank:
    """One rank. The process's hooks serve it until `close`.

    Args:
        folder: for the model, the session and the disk.
        ranks: of the engine.
        group: of `torch.distributed`, for SGLang's own exchanges; None for one rank.
        settings: FlexKV's.
        mode: SGLang's `--disaggregation-mode`.
        events: whether SGLang publishes KV events.

    Attributes:
        rank: FlexKV's side, without SGLang.
        tree: SGLang's prefix cache.
        linker: between them.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks | None = None,
        group: Any = None,
        settings: dict[str, Any] | None = None,
        mode: str = "null",
        *,
        events: bool = False,
    ) -> None:
        # What SGLang publishes when a server starts.
        runtime_context._CONTEXT._config_bags = {
            "disagg": SimpleNamespace(disaggregation_mode=mode)
        }
        size = _POOL_PAGES * PAGE
        self._pool = MHATokenToKVPool(size, PAGE, torch.float16, 1, 8, LAYERS, "cpu", False)
        count = 1 if ranks is None else ranks.count
        self.rank = Rank(folder, pool=self._pool, heads=count, ranks=ranks, settings=settings)
        self.slots = PagedTokenToKVPoolAllocator(
            size, PAGE, torch.float16, "cpu", self._pool, False
        )
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(4, 64, "cpu", False),
                token_to_kv_pool_allocator=self.slots,
                page_size=PAGE,
                tp_cache_group=group,
                attn_tp_cache_group=group,
                enable_kv_cache_events=events,
                tree_components=(ComponentType.FULL,),
            )
        )
        # The constructor reads a whole server's settings.
        self.linker = object.__new__(FlexKVLinker)
        self.linker.side = self.rank.side
        self.linker.forward_stream = self.linker._stream = None
        self.linker._page_size = PAGE
        self.linker._numbers = DeviceSlots(torch.device("cpu"))
        self.linker.pools = {PoolName.KV: self._pool}
        self.linker.layer_done_counter = LayerCounter(LAYERS, self.rank.side.wait_for_layer)
        self.linker._metrics = SimpleNamespace(report=lambda side: None)  # type: ignore[assignment]
        self.tree.init_cache_linker(self.linker)
        if events:
            self.rank.side.watch()
        hooks.serve(self.rank.side)

    def compute(
        self, tokens: Sequence[int], seed: int, salt: str | None = None
    ) -> list[torch.Tensor]:
        """A request has computed these tokens: SGLang offloads their pages. Returns the bytes."""
        slots = self.slots.alloc(len(tokens))
        generator = torch.Generator().manual_seed(seed)
        for buffer in self._buffers():
            numbers = torch.randint(0, 100, buffer[slots].shape, generator=generator)
            buffer[slots] = numbers.to(buffer.dtype)
        key = RadixKey(array("q", tokens), cache_salt=salt)
        self.tree.insert(InsertParams(key=key, value=slots))
        return self.read(slots)

    def settle(self) -> None:
        """Poll, as SGLang does in each step, until no offload is under way."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.tree.linker.pending_offloads:
            assert time.monotonic() < deadline
            self.tree.check_hicache_events()

    def request(self, rid: str, tokens: Sequence[int]) -> Any:
        return Req(rid, "", array("q", tokens), SamplingParams())

    def look_ahead(self, requests: Sequence[Any]) -> None:
        """SGLang chooses a batch, and takes none of these requests yet."""
        scheduler = SimpleNamespace(
            waiting_queue=list(requests),
            grammar_manager=Grammars(),
            tree_cache=self.tree,
            device="cuda",
            last_batch=None,
        )
        running = SimpleNamespace(is_empty=lambda: False)
        hooks.schedule(lambda scheduler: (None, running), scheduler)

    def run(self, request: Any) -> tuple[int, bool, list[torch.Tensor]]:
        """A request's turn: look it up, load, compute. Returns how many tokens were loaded, whether
        SGLang serves the request, and the loaded bytes. Frees the loaded pages."""
        request.init_next_round_input(self.tree)
        found = self.tree.init_load_back(
            InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
        )
        assert found is not None
        request.host_loaded_length, request.last_node = found
        request.prefix_len += request.host_loaded_length
        index = self.tree.ready_to_load_host_cache()
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
        loaded = request.host_loaded_length
        slots = self.tree.prefix_device_indices(request)[-loaded:] if loaded else torch.arange(0)
        failed = self.tree.finish_external_linker_loads([request])
        bytes_ = self.read(slots)
        if loaded:
            self.slots.free(slots)
        return loaded, not failed, bytes_

    def forget(self) -> None:
        """SGLang flushes its own cache."""
        self.tree.reset()
        self.slots.clear()

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[slots].clone() for buffer in self._buffers()]

    def close(self) -> None:
        runtime_context._CONTEXT._config_bags = None
        hooks.leave(self.rank.side)
        self.rank.close()

    def _buffers(self) -> list[torch.Tensor]:
        return [*self._pool.k_buffer, *self._pool.v_buffer]
