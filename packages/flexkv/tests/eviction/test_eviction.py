# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import tracemalloc

import pytest
from policy_checks import PolicyModel, evict, insert

from flexkv.eviction import POLICIES, UNKNOWN_REQUEST, RequestContext
from flexkv.eviction.policy import hazard_policy
from flexkv.types.errors import ConfigError


class HazardModel(PolicyModel):
    make = staticmethod(lambda: hazard_policy(12))


TestHazard = HazardModel.TestCase


def test_victims_are_exactly_the_blocks_that_are_not_held() -> None:
    policy = hazard_policy(50)
    keys = {bytes([i]) for i in range(50)}
    for key in sorted(keys):
        policy.inserted(key, None)
        if key[0] % 7:
            policy.released(key, key[0])
    for i in range(0, 50, 3):
        policy.hit(bytes([i]), 100 + i, UNKNOWN_REQUEST)
    seen = set()
    while (key := policy.victim()) is not None:
        policy.evicted(key)
        seen.add(key)
    assert seen == {key for key in keys if key[0] % 7}


def test_a_block_takes_a_bounded_number_of_bytes() -> None:
    """Prompts of ten blocks that nobody sends twice. The key takes 65 of these bytes, keys of
    ghosts as much again."""
    blocks = 5_000
    policy = hazard_policy(blocks)
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(0, 20 * blocks, 10):
            prompt = [os.urandom(32) for _ in range(10)]
            policy.began(prompt, RequestContext(request_id="r"), float(i))
            if i >= blocks:
                evict(policy, 10)
            insert(policy, *prompt, used=i)
            policy.ended("r", 100, float(i))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 700 * blocks


def test_a_tier_of_too_many_blocks_is_named() -> None:
    with pytest.raises(ConfigError, match="16777216; allowed: 1 to 16777215 blocks; or"):
        POLICIES["hazard"](1 << 24)
