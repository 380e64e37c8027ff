# SPDX-License-Identifier: Apache-2.0
"""Tenants that share an index: what one below its share has, it keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.eviction import (
    NO_GUARD,
    POLICIES,
    UNKNOWN_REQUEST,
    GuardState,
    LRUPolicy,
    RequestContext,
    TenantPolicies,
)
from flexkv.index.block_index import BlockIndex, block_index, index_bytes
from flexkv.types.tenants import NO_TENANT, tenant_number

A, B, C = (tenant_number(name) for name in "abc")


class KeptByPython:
    """A policy of Python, by the order of release."""

    def __init__(self) -> None:
        self.free: dict[bytes, None] = {}
        self.known: set[bytes] = set()

    def began(self, *_: object) -> None: ...
    def ended(self, *_: object) -> None: ...
    def hit(self, *_: object) -> None: ...
    def touched(self, *_: object) -> None: ...

    def inserted(self, key: bytes, *_: object) -> None:
        self.known.add(key)

    def held(self, key: bytes) -> None:
        del self.free[key]

    def released(self, key: bytes, _: int) -> None:
        assert key in self.known
        self.free[key] = None

    def evicted(self, key: bytes) -> None:
        self.known.remove(key)
        self.free.pop(key, None)

    def victim(self) -> bytes | None:
        return next(iter(self.free), None)

    def guard_state(self) -> GuardState:
        return NO_GUARD

    def clear(self) -> None:
        self.free.clear()
        self.known.clear()


MAKERS: dict[str, Callable[[int], Any]] = {**POLICIES, "python": lambda _: KeptByPython()}


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[[int], Any]:
    """Makes the policy of a tenant."""
    return MAKERS[request.param]


def shared(shares: dict[str, float], slots: int, make: Callable[[int], Any]) -> BlockIndex:
    return block_index(slots, TenantPolicies(shares, slots, make))


def store(index: BlockIndex, tenant: int, *keys: bytes, after: bytes | None = None) -> int:
    """Store a chain, a block at a time. Returns how many blocks got a slot."""
    stored = 0
    for key in keys:
        block = index.reserve(key, after, tenant)
        if block is None:
            break
        index.publish([block])
        stored, after = stored + 1, key
    return stored


def named(name: str, count: int, start: int = 0) -> list[bytes]:
    return [b"%s %d" % (name.encode(), number) for number in range(start, start + count)]


def single(index: BlockIndex, tenant: int, *keys: bytes) -> None:
    """Store blocks that build on none."""
    for key in keys:
        store(index, tenant, key)


def test_what_a_tenant_does_not_use_is_lent_and_comes_back(make: Callable[[int], Any]) -> None:
    index = shared({"a": 0.5, "b": 0.25}, 8, make)
    single(index, B, *named("b", 8))
    assert index.tenants == {NO_TENANT: 0, A: 0, B: 8}
    single(index, A, *named("a", 10))
    assert index.tenants == {NO_TENANT: 0, A: 5, B: 3}, "lent in proportion"
    single(index, C, *named("c", 1))
    assert index.tenants == {NO_TENANT: 1, A: 5, B: 2}
    single(index, NO_TENANT, *named("d", 9))
    assert index.tenants == {NO_TENANT: 2, A: 4, B: 2}
    single(index, B, *named("e", 9))
    assert index.tenants == {NO_TENANT: 2, A: 4, B: 2}


def test_the_tenant_that_is_most_over_its_share_loses_first(make: Callable[[int], Any]) -> None:
    index = shared({"a": 0.5, "b": 0.25}, 16, make)
    single(index, B, *named("b", 6))
    single(index, A, *named("a", 10))
    single(index, C, *named("c", 1))
    assert index.tenants == {NO_TENANT: 1, A: 10, B: 5}


def test_without_a_rest_others_have_only_what_is_lent(make: Callable[[int], Any]) -> None:
    index = shared({"a": 1.0}, 4, make)
    single(index, C, *named("c", 4))
    single(index, A, *named("a", 1))
    assert index.tenants == {NO_TENANT: 3, A: 1}
    single(index, A, *named("a", 3, 1))
    assert store(index, C, b"more") == 0, "a has all of its share"
    assert index.tenants == {NO_TENANT: 0, A: 4}
    assert all(key in index for key in named("a", 4))


def test_what_is_held_does_not_leave_nor_does_what_others_have_a_right_to(
    make: Callable[[int], Any],
) -> None:
    index = shared({"a": 0.5, "b": 0.5}, 8, make)
    single(index, B, *named("b", 6))
    single(index, A, *named("a", 2))
    held = index.lease(named("b", 6))
    assert held is not None
    assert store(index, B, b"more") == 0
    assert index.take_slots(1, 1) == [], "whoever it is for"
    assert not index.has_room
    assert store(index, A, b"own") == 1, "a gives up one of its own"
    assert index.tenants == {NO_TENANT: 0, A: 2, B: 6}
    index.release(held)
    assert store(index, A, b"second") == 1
    assert index.tenants == {NO_TENANT: 0, A: 3, B: 5}


def test_blocks_being_written_and_slots_of_writers_count(make: Callable[[int], Any]) -> None:
    index = shared({"a": 0.5, "b": 0.5}, 8, make)
    single(index, A, *named("a", 4))
    writing = index.reserve_all(named("w", 2), [0, 1], [0, 1], False, [B, B])
    slots = index.take_slots(2, 1, B)
    assert index.tenants == {NO_TENANT: 0, A: 4, B: 4}
    assert index.take_slots(1, 1, B) == [], "b has its share, though none of its blocks is ready"
    assert store(index, B, b"more") == 0
    placed = index.place(named("p", 1), [0], [0], slots[:1], [B])
    index.publish(placed)
    index.give_back(slots[1:])
    assert index.tenants == {NO_TENANT: 0, A: 4, B: 3}
    index.abandon(writing)
    assert index.tenants == {NO_TENANT: 0, A: 4, B: 1}
    index.clear()
    index.sweep(8)
    assert index.tenants == {NO_TENANT: 0, A: 0, B: 0}


def test_a_block_counts_for_the_tenant_that_stored_it_first(make: Callable[[int], Any]) -> None:
    index = shared({"a": 0.5, "b": 0.25}, 8, make)
    store(index, A, b"system")
    store(index, B, *named("b", 2), after=b"system")
    assert index.reserve(b"system", None, B) is None
    assert index.tenants == {NO_TENANT: 0, A: 1, B: 2}
    keys = [b"system", *named("b", 4)]
    index.began(keys, RequestContext(request_id="r", tenant=B), 1.0)
    index.hit(keys[:3], RequestContext(request_id="r", tenant=B))
    index.ended("r", 3, 2.0)
    (block,) = [each for each in index.blocks if each.key == b"system"]
    assert block.tenant == A


def test_tenants_outlive_the_owner_of_the_memory(make: Callable[[int], Any]) -> None:
    memory = bytearray(index_bytes(8))
    policy = TenantPolicies({"a": 0.5, "b": 0.25}, 8, make)
    index = block_index(8, policy, memory)
    single(index, A, *named("a", 3))
    single(index, C, *named("c", 1))
    index.take_slots(1, 3, B)
    again = block_index(8, TenantPolicies({"b": 0.5, "a": 0.25}, 8, make), memory, begun=True)
    assert again.tenants == {NO_TENANT: 1, A: 3, B: 1}
    again.give_back(again.taken_by(3))
    other = block_index(8, TenantPolicies({"c": 0.5}, 8, make), memory, begun=True)
    assert other.tenants == {NO_TENANT: 3, C: 1}, "b had none"
    single(other, C, *named("x", 8))
    assert other.tenants == {NO_TENANT: 3, C: 5}


def test_an_index_goes_on_after_an_error_with_what_it_has(make: Callable[[int], Any]) -> None:
    index = shared({"a": 0.5, "b": 0.25}, 8, make)
    single(index, A, *named("a", 3))
    leased = index.lease(named("a", 2))
    writing = index.reserve(b"w", None, B)
    assert leased is not None
    assert writing is not None
    index.settle([], [], [])
    assert index.tenants == {NO_TENANT: 0, A: 3, B: 0}
    single(index, B, *named("b", 9))
    assert index.tenants == {NO_TENANT: 0, A: 3, B: 5}
    single(index, A, *named("x", 9))
    assert index.tenants == {NO_TENANT: 0, A: 5, B: 3}


def test_shares_of_no_tenant_are_refused() -> None:
    with pytest.raises(ValueError, match="a tenant is its number"):
        shared({"a": float("nan")}, 8, lambda _: LRUPolicy())
    with pytest.raises(ValueError, match="2 tenants for 1 keys"):
        block_index(4, LRUPolicy()).reserve_all([b"k"], [0], [0], False, [1, 2])
    with pytest.raises(ValueError, match="tenant 4294967295; allowed: below"):
        block_index(4, LRUPolicy()).reserve(b"k", None, 0xFFFFFFFF)
    assert block_index(4, LRUPolicy()).tenants == {}


SLOTS = 12
SHARES = {A: 0.25 * SLOTS, B: 0.5 * SLOTS, NO_TENANT: 0.25 * SLOTS}
TENANTS = st.sampled_from([A, B, C, NO_TENANT])
ACTS = st.one_of(
    st.tuples(st.just("store"), TENANTS, st.integers(0, 30), st.integers(0, 3)),
    st.tuples(st.just("take"), st.one_of(TENANTS, st.none()), st.just(0), st.just(0)),
    st.tuples(st.just("write"), TENANTS, st.integers(0, 30), st.just(0)),
    st.tuples(st.just("place"), TENANTS, st.integers(0, 30), st.just(0)),
    st.tuples(st.just("use"), TENANTS, st.integers(0, 30), st.integers(0, 5)),
    st.tuples(
        st.sampled_from(["lease", "release", "pin", "unpin", "return", "publish", "clear"]),
        TENANTS,
        st.integers(0, 30),
        st.just(0),
    ),
)


class World:
    """An index, and what is held of it."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.index = shared({"a": 0.25, "b": 0.5}, SLOTS, make)
        self.leases: list[Any] = []
        self.pins: list[Any] = []
        self.taken: list[int] = []
        self.writing: list[Any] = []
        self.now = 0.0

    def blocks(self) -> dict[bytes, int]:
        return {block.key: block.tenant for block in self.index.blocks}

    def evicting(self, asking: int | None, act: Callable[[], Any]) -> Any:
        """Do what may evict a block, and see that the tenant that lost it had no right to it."""
        before, slots = self.blocks(), self.over(None)
        would = self.over(asking)
        result = act()
        asks = None if asking is None else self.part(asking)
        for key in before.keys() - self.blocks().keys():
            loser = self.part(before[key])
            if loser != asks and slots[loser] <= 0:
                assert max(slots.values()) <= 0, "another tenant was above its share"
                assert max(would.values()) <= 0, "the tenant that stores comes above its share"
        return result

    def over(self, asking: int | None) -> dict[int, float]:
        """By how many slots each tenant is above its share, with one more for `asking`."""
        found = self.index.tenants
        if asking is not None:
            found[self.part(asking)] += 1
        return {tenant: count - SHARES[tenant] for tenant, count in found.items()}

    @staticmethod
    def part(tenant: int) -> int:
        return tenant if tenant in SHARES else NO_TENANT

    def act(self, what: str, tenant: Any, number: int, more: int) -> None:
        index, key = self.index, b"%d" % number
        if what == "store":
            chain = [key, *(b"%d.%d" % (number, depth) for depth in range(more))]
            after = None
            for each in chain:
                block = self.evicting(tenant, lambda e=each, a=after: index.reserve(e, a, tenant))  # type: ignore[misc]
                if block is not None:
                    index.publish([block])
                after = each
        elif what == "write":
            block = self.evicting(tenant, lambda: index.reserve(key, None, tenant))
            if block is not None:
                self.writing.append(block)
        elif what == "take":
            self.taken += self.evicting(tenant, lambda: index.take_slots(1, 1, tenant))
        elif what == "place" and self.taken:
            slot = self.taken.pop()
            placed = index.place([key], [0], [0], [slot], [tenant])
            if placed:
                index.publish(placed)
            else:
                index.give_back([slot])
        elif what == "use":
            self.now += 1.0
            keys = [key, *(b"%d.%d" % (number, depth) for depth in range(more))]
            context = RequestContext(request_id=str(self.now), tenant=tenant)
            index.began(keys, context, self.now)
            index.hit(keys, context)
            index.touch(keys)
            index.ended(context.request_id, 1, self.now)
        else:
            self.hold(what, key)

    def hold(self, what: str, key: bytes) -> None:
        index = self.index
        if what == "lease" and (leased := index.lease([key])):
            self.leases.append(leased)
        elif what == "release" and self.leases:
            index.release(self.leases.pop(0))
        elif what == "pin" and (pinned := index.pin(key)):
            self.pins.append(pinned)
        elif what == "unpin" and self.pins:
            index.unpin(self.pins.pop(0))
        elif what == "return" and self.taken:
            index.give_back([self.taken.pop()])
        elif what == "publish" and self.writing:
            index.publish([self.writing.pop(0)])
        elif what == "clear":
            index.clear()
            index.sweep(SLOTS)
            self.pins.clear()

    def check(self) -> None:
        found = self.index.tenants
        counted = dict.fromkeys(found, 0)
        for tenant in self.blocks().values():
            counted[self.part(tenant)] += 1
        spare = {each: found[each] - count for each, count in counted.items()}
        assert all(each >= 0 for each in spare.values())
        assert sum(spare.values()) <= len(self.taken), "no slot counts without a block or a writer"


@pytest.mark.parametrize("policy", list(MAKERS))
@settings(max_examples=150, deadline=None)
@given(acts=st.lists(ACTS, max_size=120))
def test_a_tenant_below_its_share_loses_nothing(policy: str, acts: list[Any]) -> None:
    world = World(MAKERS[policy])
    for act in acts:
        world.act(*act)
        world.check()


def test_an_unknown_request_counts_for_no_tenant() -> None:
    assert UNKNOWN_REQUEST.tenant == NO_TENANT == tenant_number("")
    assert 0 < A < 0xFFFFFFFF


def ask(index: BlockIndex, tenant: int, keys: list[bytes], now: float) -> int:
    """A request of a tenant. Returns how many blocks of its prompt it finds."""
    found = index.lookup(keys)
    context = RequestContext(len(keys), found, str(now), tenant=tenant)
    index.began(keys, context, now)
    index.hit(keys[:found], context)
    tenants = [tenant] * len(keys)
    index.publish(index.reserve_all(keys, range(found, len(keys)), [0], False, tenants))
    index.touch(keys)
    index.ended(str(now), 1, now)
    return found


def test_the_guard_of_a_tenant_knows_its_room() -> None:
    """It compares with LRU on as many blocks as the tenant may have, not on all of the tier."""
    policies = TenantPolicies({"a": 0.5}, 1024, POLICIES["hazard"])
    index, alone = block_index(1024, policies), block_index(512, LRUPolicy())
    single(index, C, *named("c", 1024))
    chance = random.Random(3)
    hits, lru_hits = 0, 0
    for number in range(4000):
        keys = named(f"a{chance.randint(0, 219)}", 4)
        hits += ask(index, A, keys, float(number))
        lru_hits += ask(alone, A, keys, float(number))
    assert index.tenants == {NO_TENANT: 512, A: 512}
    (_, _, others), (_, _, own) = policies.parts
    assert own is not None
    assert others is not None
    state = own.guard_state()
    assert state.hits == hits
    assert lru_hits < 13_000, "with all of the tier, LRU would find nearly all of 16,000"
    assert state.lru_hits == pytest.approx(lru_hits, rel=0.05)
    total = policies.guard_state()
    assert (total.hits, total.trusts_hazard) == (hits, state.trusts_hazard)


def test_a_tenant_learns_from_prompts_that_begin_with_blocks_of_another() -> None:
    policies = TenantPolicies({"a": 0.5, "b": 0.25}, 64, POLICIES["hazard"])
    index = block_index(64, policies)
    system = named("system", 4)
    ask(index, A, system, 0.0)
    for number in range(1, 5):
        assert ask(index, B, [*system, *named("b", 6)], float(number)) == (4 if number == 1 else 10)
    states = [each.guard_state() for _, _, each in policies.parts if each is not None]
    assert [(state.hits, state.lru_hits) for state in states] == [
        (0, 0),
        (16, 16),
        (18, 18),
    ], "of the others, of a, and of b"
