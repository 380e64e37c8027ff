# SPDX-License-Identifier: Apache-2.0
"""What each policy keeps, replayed over a `KVCache` whose loads and stores end at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from policy_checks import CheckedPolicy
from tiered_engine import Engine

from flexkv import KVCache
from flexkv.eviction import POLICIES, AnyPolicy, LRUPolicy, RequestContext
from flexkv.figures.definitions import sample
from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.types.mover import Status

SLOTS = 40
BLOCK_TOKENS = 16
HOT = [b"hot %d" % i for i in range(8)]
"""A prefix that many requests begin with."""


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


@pytest.mark.parametrize(("name", "hits"), [("hazard", 5), ("lru", 0)])
def test_figures_tell_hits_from_those_of_lru(name: str, hits: int) -> None:
    replay = Replay(POLICIES[name](SLOTS))
    try:
        for blocks in (2, 3, 3):
            replay.run(HOT[:blocks])
        figures = replay.cache.figures()
        for policy in ("used", "lru"):
            assert figures.own.get(sample("guard_hit_blocks", "host", policy), 0) == hits
        assert figures.own.get(sample("guard_switches", "host"), 0) == 0
        assert figures.shared[sample("guard_fallbacks", "host")] == 0
        credit = 0.04 * SLOTS + 0.005 * hits if hits else 0
        assert figures.shared[sample("guard_credit_blocks", "host")] == pytest.approx(credit)
    finally:
        replay.arena.close()


def test_the_disk_learns_of_requests_and_of_what_blocks_build_on(tmp_path: Path) -> None:
    policies: list[CheckedPolicy] = []

    def make(slots: int) -> CheckedPolicy:
        made = POLICIES["hazard"](slots)
        assert not isinstance(made, LRUPolicy)
        policies.append(CheckedPolicy(made))
        return policies[-1]

    engine = Engine(tmp_path, slots=4, disk_slots=6, policy=make)
    disk = policies[0]
    try:
        engine.store("s", "a", "b")
        assert (disk.held_blocks, set(disk.evictable)) == ({b"s", b"a"}, {b"b"})
        prompt = [b"s", b"a", b"b", b"c"]
        context = RequestContext(4 * BLOCK_TOKENS, 3 * BLOCK_TOKENS, request_id="one")
        engine.cache.record(prompt[:3], context, prompt)
        assert disk.prompts == [(prompt, context)]
        engine.settle()
        engine.cache.ended("one", 7)
        assert disk.answers == {"one": 7}
        shared = engine.cache.figures().shared
        assert shared[sample("eviction_policies", "disk", "hazard")] == 1
        assert shared[sample("guard_hit_blocks", "disk", "used")] == 3
        for name in "defgh":
            engine.store("s", name)
            (has_s,) = engine.disk.contains([b"s"])
            assert has_s, "blocks that build on it are there"
    finally:
        engine.close()
