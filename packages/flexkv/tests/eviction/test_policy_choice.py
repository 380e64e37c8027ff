# SPDX-License-Identifier: Apache-2.0
"""The policy that `auto` selects, and how `hazard` begins."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiered_engine import Engine, keys

from flexkv import KVLayout, TensorView, open_cache
from flexkv.eviction import AUTO, MOST_BLOCKS, POLICIES, RequestContext, choose_policy
from flexkv.index.block_index import block_index
from flexkv_kernels.hazard import HazardPolicy

SLOTS = 64
LEARNS_AFTER = 50
"""Requests before the policy learns for the first time."""


@pytest.mark.parametrize("follows", [False, True])
def test_lru_is_used_everywhere_if_it_is_set(follows: bool) -> None:
    assert choose_policy("lru", SLOTS, follows_requests=follows) == "lru"


def test_auto_is_hazard_where_requests_are_followed() -> None:
    assert choose_policy(AUTO, SLOTS, follows_requests=True) == "hazard"
    assert choose_policy(AUTO, SLOTS, follows_requests=False) == "lru"


def test_auto_is_lru_for_a_tier_too_large_for_hazard() -> None:
    assert choose_policy(AUTO, MOST_BLOCKS, follows_requests=True) == "hazard"
    assert choose_policy(AUTO, MOST_BLOCKS + 1, follows_requests=True) == "lru"
    with pytest.raises(ValueError, match=f"allowed: 1 to {MOST_BLOCKS} blocks"):
        HazardPolicy(MOST_BLOCKS + 1)


def test_auto_is_lru_without_an_engine(
    made_policies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flexkv")
    layout = KVLayout.from_tensors([TensorView.of("layer", np.zeros((8, 4096), np.uint8))], 8)
    settings = {"cpu_cache_gb": 8 * 4096 / (1 << 30), "eviction_policy": AUTO}
    with open_cache(settings, layout):
        assert "host memory evicts by lru (eviction_policy is auto)" in caplog.messages
    assert made_policies == ["lru"]


def test_no_block_is_refused_while_there_is_room(tmp_path: Path) -> None:
    """Not even blocks that their clients do not expect back."""
    slots = 8
    policy = choose_policy(AUTO, slots, follows_requests=True)
    engine = Engine(tmp_path, slots=slots, policy=policy, admission="second_hit")
    try:
        for prompt in ("abc", "ab", "xyz", "pq"):
            prefix = keys(*prompt)
            context = RequestContext(request_id=prompt, returns=False)
            engine.cache.record((), context, prefix)
            if engine.cache.missing(prefix):
                engine.store(*prompt)
            engine.cache.ended(prompt, 100)
            assert engine.cache.lookup(prefix) == len(prefix)
        assert engine.cache.ready_blocks == slots
        assert engine.cache.counters.refused_blocks == 0
    finally:
        engine.close()


def contents(policy: str, pause: float, seed: int) -> Iterator[frozenset[bytes]]:
    """The blocks after each request of an engine that has just started. Requests repeat earlier
    prompts, the recent ones more often, or send new ones, `pause` seconds apart on average."""
    rng = random.Random(seed)
    index = block_index(SLOTS, POLICIES[policy](SLOTS))
    prompts: list[list[bytes]] = []
    now = 0.0
    for number in itertools.count():
        age = int(rng.expovariate(0.1))
        if age < len(prompts) and rng.random() < 0.7:
            prompt = prompts.pop(-1 - age)
        else:
            prompt = [rng.randbytes(16) for _ in range(rng.randint(1, 9))]
        prompts.append(prompt)
        now += rng.expovariate(1 / pause)
        hits, context = index.lookup(prompt), RequestContext(request_id=str(number))
        index.began(prompt, context, now)
        index.hit(prompt[:hits], context)
        missing = [i for i in range(len(prompt)) if prompt[i] not in index]
        index.publish(index.reserve_all(prompt, missing, (0,)))
        index.touch(prompt)
        index.ended(str(number), rng.randint(1, 300), now)
        yield frozenset(key for each in prompts for key in each if key in index)


@pytest.mark.parametrize("pause", [0.05, 3.0, 60.0])
@pytest.mark.parametrize("seed", range(5))
def test_until_hazard_has_learned_it_evicts_as_lru(pause: float, seed: int) -> None:
    both = zip(contents("lru", pause, seed), contents("hazard", pause, seed), strict=True)
    for lru, hazard in itertools.islice(both, LEARNS_AFTER - 1):
        assert lru == hazard
    assert len(lru) == SLOTS, "blocks were evicted"
    assert any(lru != hazard for lru, hazard in itertools.islice(both, 10 * LEARNS_AFTER))
