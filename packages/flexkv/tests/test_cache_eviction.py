# SPDX-License-Identifier: Apache-2.0
"""What each policy keeps, replayed over a `KVCache` whose loads and stores end at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from policy_checks import CheckedPolicy

from flexkv import KVCache
from flexkv.eviction import POLICIES, AnyPolicy, LRUPolicy, RequestContext, S3FIFOPolicy
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.types.mover import Status

SLOTS = 40
BLOCK_TOKENS = 16
HOT = [b"hot %d" % i for i in range(8)]
"""A prefix that many requests begin with."""


class ForgetfulPolicy(S3FIFOPolicy):
    """S3-FIFO as it would be if a lease made it forget a block."""

    def held(self, key: bytes) -> None:
        super().held(key)
        self._blocks[key].hits = 0


class Replay:
    """Runs requests one after the other."""

    def __init__(self, policy: AnyPolicy) -> None:
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (64,)), SLOTS), threads=1)
        self.cache = KVCache(self.arena, policy)

    def run(self, prompt: list[bytes]) -> int:
        """Returns how many blocks were hits."""
        cache = self.cache
        hits = cache.lookup(prompt)
        context = RequestContext(len(prompt) * BLOCK_TOKENS, hits * BLOCK_TOKENS)
        cache.record(prompt[:hits], context)
        load = cache.load(prompt[:hits]) if hits else None
        missing = cache.missing(prompt)
        store = cache.store(prompt, missing) if missing else None
        for transfer in (load, store):
            if transfer is not None:
                self.arena.board.report(transfer.cell, 0, Status.DONE)
        cache.poll()
        cache.touch(prompt)
        while cache.busy:
            cache.poll()
        return hits

    def scan(self, name: str, prompts: int) -> None:
        """Prompts that nobody sends twice."""
        for i in range(prompts):
            self.run([b"%s %d %d" % (name.encode(), i, block) for block in range(4)])


@pytest.fixture
def replays() -> Iterator[dict[type, Replay]]:
    policies: list[AnyPolicy] = [LRUPolicy(), S3FIFOPolicy(), ForgetfulPolicy()]
    made = {type(policy): Replay(policy) for policy in policies}
    yield made
    for each in made.values():
        each.arena.close()


def hits_of(replay: Replay) -> list[int]:
    """Blocks of the hot prefix that requests find, each after a scan that fills the cache twice."""
    for _ in range(3):
        replay.run(HOT)
    found = []
    for turn in range(5):
        replay.scan(str(turn), 2 * SLOTS // 4)
        found.append(replay.run(HOT))
    return found


def test_s3fifo_keeps_a_hot_prefix_that_a_scan_takes_from_lru(
    replays: dict[type, Replay],
) -> None:
    assert hits_of(replays[S3FIFOPolicy]) == [len(HOT)] * 5
    assert hits_of(replays[LRUPolicy]) == [0] * 5


def test_hits_are_remembered_over_loads(replays: dict[type, Replay]) -> None:
    assert hits_of(replays[S3FIFOPolicy]) > hits_of(replays[ForgetfulPolicy])


def test_s3fifo_takes_a_prefix_back_that_left_a_moment_ago(replays: dict[type, Replay]) -> None:
    replay = replays[S3FIFOPolicy]
    replay.run(HOT)
    replay.scan("before", SLOTS // 4)
    assert replay.run(HOT) == 0
    replay.scan("after", 4 * SLOTS // 4)
    assert replay.run(HOT) == len(HOT)


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"lru"}))
def test_a_policy_knows_the_request_of_each_hit(name: str) -> None:
    made = POLICIES[name](SLOTS)
    assert not isinstance(made, LRUPolicy)
    policy = CheckedPolicy(made)
    replay = Replay(policy)
    try:
        replay.run(HOT[:2])
        replay.run(HOT[:3])
        context = RequestContext(3 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
        hits = {key: [context] for key in HOT[:2]}
        assert policy.hits == {**hits, HOT[2]: []}
    finally:
        replay.arena.close()


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefix_leaves_from_its_end(name: str) -> None:
    replay = Replay(POLICIES[name](SLOTS))
    try:
        prefix = [b"long %d" % i for i in range(SLOTS)]
        replay.run(prefix)
        for left in range(SLOTS - 1, 0, -1):
            replay.run([b"short %d" % left])
            assert replay.cache.lookup(prefix) == left
            assert replay.cache.ready_blocks == SLOTS
    finally:
        replay.arena.close()
