# SPDX-License-Identifier: Apache-2.0
"""A model of full attention and recurrent states, under vLLM's real scheduler."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from connector_rank import ConnectorRank
from engine_world import MakeWorld, World
from kv_pages import BLOCK_TOKENS, HEAD_BYTES, HEADS, LAYERS, token_bytes
from ranks import Rank
from texts import Text
from traffic import SEEDS, Traffic, loaded, make_stems, preempted, refused
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from flexkv_vllm.compat.core import tells_states

pytestmark = pytest.mark.skipif(not tells_states(), reason="states are cached from vLLM 0.32 on")

PAGE_BYTES = BLOCK_TOKENS * HEADS * HEAD_BYTES
STATES = 1
"""The group of the recurrent layers."""


@dataclasses.dataclass(slots=True, kw_only=True)
class StateRank(ConnectorRank):
    """A rank whose second group has recurrent layers. The state behind a token is the bytes of that
    token, in the block of its position.

    Attributes:
        copied: how many blocks vLLM has copied to others.
    """

    copied: int = 0

    def forward(self, output: SchedulerOutput, texts: Mapping[str, Text], weights: bytes) -> None:
        for source, destination in output.kv_cache_block_copies or ():
            self.copied += 1
            for layer in range(LAYERS):  # groups share memory
                pages = self.pages[f"layer{layer}"]
                pages[destination] = pages[source].clone()
        ConnectorRank.forward(self, output, texts, weights)

    def _forward_group(
        self, request_id: str, group: int, tokens: list[int], start: int, weights: bytes
    ) -> None:
        if group != STATES:
            ConnectorRank._forward_group(self, request_id, group, tokens, start, weights)
            return
        table = self.tables[request_id][group]
        rows = token_bytes(tokens, weights).flatten(2).repeat(1, 1, BLOCK_TOKENS)
        end = len(tokens)
        before, after = ((each - 1) // BLOCK_TOKENS for each in (start, end))
        for layer in range(LAYERS):
            pages = self.pages[f"layer{group * LAYERS + layer}"]
            state = rows[layer, end - 1]
            if start:
                block = table[before]
                if not torch.equal(pages[block], rows[layer, start - 1]):
                    message = f"{request_id} computes on at {start} from a wrong state ({block})"
                    self.wrong.setdefault(request_id, (block, message))
                    state = ~state
                self.checked_bytes += PAGE_BYTES
            pages[table[after]] = state


class StateWorld(World):
    """With recurrent states, which vLLM also finds inside of blocks."""

    hash_tokens = 4

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, windows=(1,), **options)

    def _make_kv_cache_config(self, ranks: int) -> KVCacheConfig:
        self.vllm_config.cache_config.mamba_cache_mode = "align"
        config = super()._make_kv_cache_config(ranks)
        config.kv_cache_groups[STATES].kv_cache_spec = MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=((PAGE_BYTES,),),
            dtypes=(torch.int8,),
            mamba_cache_mode="align",
        )
        config.hash_block_size = self.hash_tokens
        return config

    def _make_pages(self, ranks: int, stage: int) -> dict[str, torch.Tensor]:
        pages = super()._make_pages(ranks, stage)
        for layer in range(LAYERS):
            raw = pages[f"layer{layer}"].transpose(1, 2)
            pages[f"layer{STATES * LAYERS + layer}"] = raw.view(self.num_blocks, PAGE_BYTES)
        return pages

    def _start_ranks(self, ranks: int, kv_cache_config: KVCacheConfig) -> Sequence[Rank]:
        made: list[Rank] = []
        for rank in super()._start_ranks(ranks, kv_cache_config):
            fields = {each.name: getattr(rank, each.name) for each in dataclasses.fields(rank)}
            made.append(StateRank(**fields))
        return made


def copied(world: World) -> int:
    return sum(rank.copied for rank in world.ranks if isinstance(rank, StateRank))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@SEEDS
def test_random_traffic_never_computes_on_a_wrong_byte(
    make_world: MakeWorld, *, asynchronous: bool, seed: int
) -> None:
    """vLLM copies states to blocks that no request has, while late stores still read them."""
    rng = random.Random(seed)
    world = make_world(
        kind=StateWorld,
        num_blocks=60,
        slots=(30, 100)[seed % 2],
        disk_slots=(0, 60)[seed % 2],
        budget=96,
        lag=rng if asynchronous else None,
    )
    world.slow_down(rng, polls=(0, 40), failure_rate=0.1)
    Traffic(world, rng, make_stems(rng, 4, longest=220)).run(
        120, until=[preempted, loaded, refused, copied]
    )
    world.settle()
    world.assert_untracked()
