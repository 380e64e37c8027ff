# SPDX-License-Identifier: Apache-2.0
"""A connector of another cache beside FlexKV, as vLLM's MultiConnector drives it. It loads in the
step that computes the rest of a request, as LMCache's does, and some of its loads fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kv_pages import BLOCK_TOKENS, LAYERS, heads_of, token_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

if TYPE_CHECKING:
    from engine_world import World


class Load(NamedTuple):
    """A promised load: all blocks of the request, the tokens before and after the load, and the
    first block that it does not fill."""

    request_id: str
    blocks: list[int]
    start: int
    end: int
    fails_at: int


@dataclass
class OtherCache:
    """What the other cache has; its connectors find it in `cache`.

    Attributes:
        world: the engine.
        known: hashes of the blocks that it promises.
        fail: tells, of a load's blocks, how many it fills; called once a load.
        loads: all loads so far.
    """

    world: World | None = None
    known: set[Any] = field(default_factory=set)
    fail: Callable[[int], int] = lambda blocks: 0
    loads: list[Load] = field(default_factory=list)

    def learn(self, request: Any, blocks: int) -> None:
        """Promise the first blocks of a request from now on."""
        self.known.update(request.block_hashes[:blocks])


cache = OtherCache()


@dataclass
class OtherMetadata(KVConnectorMetadata):
    """The loads of a step."""

    loads: list[Load]


class OtherConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._starts: dict[str, int] = {}
        self._loads: list[Load] = []
        self._failed: set[int] = set()
        self._pages: dict[str, Any] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._starts[request.request_id] = num_computed_tokens
        blocks = num_computed_tokens // BLOCK_TOKENS
        while blocks < len(request.block_hashes) and request.block_hashes[blocks] in cache.known:
            blocks += 1
        end = min(blocks * BLOCK_TOKENS, request.num_tokens - 1)
        return max(0, end - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            start = self._starts[request.request_id]
            end = start + num_external_tokens
            first, last = start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)
            fails_at = first + cache.fail(last - first)
            load = Load(request.request_id, list(table[:last]), start, end, fails_at)
            self._loads.append(load)
            cache.loads.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        loads, self._loads = self._loads, []
        return OtherMetadata(loads)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._pages = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, OtherMetadata)
        for load in metadata.loads:
            self._load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All is loaded before the forward pass begins."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """It stores nothing."""

    def wait_for_save(self) -> None:
        """It stores nothing."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def _load(self, load: Load) -> None:
        world = cache.world
        assert world is not None
        tokens = world.texts[load.request_id].upto(load.end)
        rank = next(each for each in world.ranks if each.pages is self._pages)
        heads = heads_of(rank.number, rank.ranks)
        written = token_bytes(tokens, world.weights + bytes(0))[:, :, heads]
        for position in range(load.start // BLOCK_TOKENS, len(load.blocks)):
            block = load.blocks[position]
            if position >= load.fails_at:
                self._failed.add(block)
                continue
            first = position * BLOCK_TOKENS
            end = min(load.end, first + BLOCK_TOKENS)
            for layer in range(LAYERS):
                page = self._pages[f"layer{layer}"][block]
                page[:, : end - first] = written[layer, first:end].transpose(0, 1)
