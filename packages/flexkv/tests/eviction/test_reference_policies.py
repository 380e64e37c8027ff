# SPDX-License-Identifier: Apache-2.0
"""The policies that the benchmark compares with do what their papers say."""

from __future__ import annotations

from hypothesis.stateful import invariant
from policy_checks import PolicyModel, evict, hit, insert, names

from integration.bench.reference_policies.arc import ARCPolicy
from integration.bench.reference_policies.s3fifo import S3FIFOPolicy


class S3FIFOModel(PolicyModel):
    make = S3FIFOPolicy

    @property
    def s3fifo(self) -> S3FIFOPolicy:
        policy = self.policy.policy
        assert isinstance(policy, S3FIFOPolicy)
        return policy

    @invariant()
    def every_block_is_in_one_queue(self) -> None:
        policy = self.s3fifo
        queued = [*policy._small.order, *policy._main.order]
        aside = [key for key, block in policy._blocks.items() if block.aside]
        assert sorted(queued + aside) == sorted(self.policy.hits)
        assert policy._small.blocks + policy._main.blocks == len(self.policy.hits)
        assert self.policy.held_blocks >= set(aside)
        assert policy._ghosts.keys().isdisjoint(policy._blocks)
        assert len(policy._ghosts) <= policy._capacity

    @invariant()
    def hits_are_capped(self) -> None:
        policy = self.s3fifo
        for key, block in policy._blocks.items():
            assert block.hits <= min(3, len(self.policy.hits[key]))


class ARCModel(PolicyModel):
    make = ARCPolicy

    @property
    def arc(self) -> ARCPolicy:
        policy = self.policy.policy
        assert isinstance(policy, ARCPolicy)
        return policy

    @invariant()
    def every_block_is_in_one_list(self) -> None:
        policy = self.arc
        once, again = policy._once, policy._again
        listed = [*once.order, *again.order]
        assert len(listed) == len(set(listed))
        assert self.policy.hits.keys() - self.policy.held_blocks <= set(listed)
        assert once.blocks + again.blocks == len(self.policy.hits)
        assert not (once.ghosts.keys() | again.ghosts.keys()) & self.policy.hits.keys()
        assert 0 <= policy._goal <= policy._capacity
        assert len(once.ghosts) + len(again.ghosts) <= 2 * policy._capacity

    @invariant()
    def blocks_that_were_hit_are_in_the_second_list(self) -> None:
        for key, hits in self.policy.hits.items():
            assert self.arc._list[key] is self.arc._again or not hits


TestARC = ARCModel.TestCase
TestS3FIFO = S3FIFOModel.TestCase


def test_blocks_that_no_other_request_finds_leave_in_the_order_in_which_they_came() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    assert evict(policy, 10) == names("abcdefghij")


def test_blocks_that_were_hit_twice_outlive_a_scan() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    hit(policy, *names("abc"), times=2)
    hit(policy, *names("d"))
    assert evict(policy, 7) == names("defghij")
    insert(policy, *names("klmnopq"))
    assert evict(policy, 7) == names("klmnopq")


def test_hits_are_counted_up_to_three() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghijklmnopqrst"))
    hit(policy, *names("ab"), times=2)
    evict(policy, 17)
    hit(policy, b"a", times=9)
    hit(policy, b"b", times=3)
    assert evict(policy, 2) == names("ab"), "each goes around three times"


def test_hits_before_the_main_queue_do_not_count_there() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghijklmnopqrst"))
    hit(policy, b"a", times=3)
    hit(policy, b"b", times=2)
    evict(policy, 17)
    assert evict(policy, 2) == names("ab")


def test_a_block_that_was_hit_in_the_main_queue_goes_around_again() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghijklmnopqrst"))
    hit(policy, *names("abc"), times=2)
    evict(policy, 16)
    hit(policy, b"a")
    hit(policy, b"b", times=2)
    assert evict(policy, 3) == names("cab")


def test_a_block_that_comes_again_soon_enters_the_main_queue() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    evict(policy, 2)
    insert(policy, *names("bk"))
    assert evict(policy, 9) == names("cdefghijk")
    assert policy.victim() == b"b"


def test_ghosts_are_as_many_as_the_main_queue_has_blocks() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    evict(policy, 10)
    insert(policy, *names("ba"))
    assert evict(policy, 2) == names("ab"), "only the first was forgotten"


def test_the_small_queue_has_a_tenth() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghijklmnopqrst"))
    hit(policy, *names("abcdefghijklmnopqr"), times=2)
    assert evict(policy, 2) == names("sa"), "one of twenty is less than a tenth"
    insert(policy, b"u")
    assert evict(policy, 2) == names("tb")


def test_a_lease_resets_nothing() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    hit(policy, b"a")
    policy.held(b"a")
    hit(policy, b"a")
    policy.released(b"a", 99)
    assert evict(policy, 9) == names("bcdefghij")


def test_a_block_that_is_held_at_its_turn_is_the_next_once_it_is_released() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    policy.held(b"a")
    policy.held(b"b")
    assert evict(policy, 1) == [b"c"]
    policy.released(b"b", 99)
    assert evict(policy, 2) == names("bd")
    policy.released(b"a", 99)
    assert evict(policy, 2) == names("ae")


def test_a_held_block_that_was_hit_is_promoted() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    policy.held(b"a")
    hit(policy, b"a", times=2)
    evict(policy, 3)
    policy.released(b"a", 99)
    assert evict(policy, 7) == [*names("efghij"), b"a"]


def test_a_cleared_policy_knows_no_ghosts() -> None:
    policy = S3FIFOPolicy()
    insert(policy, *names("abcdefghij"))
    evict(policy, 2)
    policy.clear()
    assert policy.victim() is None
    insert(policy, *names("bcdefghijk"))
    assert evict(policy, 1) == [b"b"]
