# SPDX-License-Identifier: Apache-2.0
"""What must hold for every policy, and policies for tests of other code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flexkv.eviction import UNKNOWN_REQUEST, EvictionPolicy, GuardState, RequestContext


class CheckedPolicy:
    """Passes every call on to `policy`.

    Attributes:
        evictable: when each block that is not held was used last.
        held_blocks: the blocks that are held.
        hits: of the blocks that are there, held or not.
        prompts: of requests that began.
        answers: tokens of those that ended, by id.
        stale: blocks that a reset has dropped, and that have not been evicted since.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.evictable: dict[bytes, int] = {}
        self.held_blocks: set[bytes] = set()
        self.hits: dict[bytes, list[RequestContext]] = {}
        self.prompts: list[tuple[list[bytes], RequestContext]] = []
        self.answers: dict[str, int] = {}
        self.stale: set[bytes] = set()

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        self.prompts.append((list(keys), context))
        self.policy.began(keys, context, now)

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        self.answers[request_id] = output_tokens
        self.policy.ended(request_id, output_tokens, now)

    def inserted(self, key: bytes, after: bytes | None, fetched: bool = False) -> None:
        assert key not in self.hits
        self.hits[key] = []
        self.held_blocks.add(key)
        self.policy.inserted(key, after, fetched)

    def hit(self, key: bytes, used: int, context: RequestContext) -> None:
        self.hits[key].append(context)
        if key in self.evictable:
            self.evictable[key] = used
        self.policy.hit(key, used, context)

    def touched(self, key: bytes, used: int) -> None:
        assert key in self.evictable
        self.evictable[key] = used
        self.policy.touched(key, used)

    def held(self, key: bytes) -> None:
        del self.evictable[key]
        self.held_blocks.add(key)
        self.policy.held(key)

    def released(self, key: bytes, used: int) -> None:
        self.held_blocks.remove(key)
        self.evictable[key] = used
        self.policy.released(key, used)

    def evicted(self, key: bytes) -> None:
        del self.hits[key]
        self.stale.discard(key)
        self.held_blocks.discard(key)
        self.evictable.pop(key, None)
        self.policy.evicted(key)

    def victim(self) -> bytes | None:
        key = self.policy.victim()
        assert (key is None) is (not self.evictable)
        assert key is None or key in self.evictable
        return key

    def guard_state(self) -> GuardState:
        return self.policy.guard_state()

    def clear(self) -> None:
        for known in (self.evictable, self.held_blocks, self.hits, self.stale):
            known.clear()
        self.policy.clear()


class UseOrderPolicy(EvictionPolicy):
    """Evicts the block used longest ago, by the calls that every policy gets."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._evictable: dict[bytes, int] = {}

    def inserted(self, key: bytes, after: bytes | None, fetched: bool = False) -> None:
        self._known.add(key)

    def hit(self, key: bytes, used: int, context: RequestContext) -> None:
        if key in self._evictable:
            self._evictable[key] = used

    def touched(self, key: bytes, used: int) -> None:
        self._evictable[key] = used

    def held(self, key: bytes) -> None:
        del self._evictable[key]

    def released(self, key: bytes, used: int) -> None:
        self._evictable[key] = used

    def evicted(self, key: bytes) -> None:
        self._known.remove(key)
        self._evictable.pop(key, None)

    def victim(self) -> bytes | None:
        return min(self._evictable, key=self._evictable.__getitem__, default=None)

    def clear(self) -> None:
        self._known.clear()
        self._evictable.clear()


_KEYS = st.integers(0, 11).map(lambda i: bytes([i]))


class PolicyModel(RuleBasedStateMachine):
    """Random lives of blocks. `CheckedPolicy` says that a victim is evictable, and that there is
    one whenever a block is."""

    make: ClassVar[Callable[[], EvictionPolicy]]

    def __init__(self) -> None:
        super().__init__()
        self.policy = CheckedPolicy(self.make())
        self.uses = 0

    def use(self) -> int:
        self.uses += 1
        return self.uses

    @rule(key=_KEYS, released=st.booleans())
    def insert(self, key: bytes, released: bool) -> None:
        if key not in self.policy.hits:
            self.policy.inserted(key, None)
            if released:
                self.policy.released(key, self.use())

    @precondition(lambda self: self.policy.hits)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.policy.hits)))
        self.policy.hit(key, self.use(), UNKNOWN_REQUEST)

    @precondition(lambda self: self.policy.evictable)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.policy.evictable)))
        self.policy.touched(key, self.use())

    @precondition(lambda self: self.policy.evictable)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.policy.held(data.draw(st.sampled_from(sorted(self.policy.evictable))))

    @precondition(lambda self: self.policy.held_blocks)
    @rule(data=st.data(), age=st.integers(0, 9))
    def release(self, data: st.DataObject, age: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.policy.held_blocks)))
        self.policy.released(key, self.use() - age)

    @precondition(lambda self: self.policy.hits)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.policy.evicted(data.draw(st.sampled_from(sorted(self.policy.hits))))

    @rule()
    def evict(self) -> None:
        victim = self.policy.victim()
        if victim is not None:
            self.policy.evicted(victim)

    @rule()
    def clear(self) -> None:
        self.policy.clear()

    @rule(length=st.integers(1, 4), first=_KEYS, request_id=st.sampled_from(["", "r", "s"]))
    def begin(self, length: int, first: bytes, request_id: str) -> None:
        keys = [bytes([(first[0] + i) % 12]) for i in range(length)]
        context = RequestContext(request_id=request_id)
        self.policy.began(keys, context, self.use() * 1.5)

    @rule(request_id=st.sampled_from(["r", "s", "t"]), tokens=st.integers(0, 300))
    def end(self, request_id: str, tokens: int) -> None:
        self.policy.ended(request_id, tokens, self.use() * 1.5)

    @invariant()
    def a_victim_stays_until_it_is_evicted(self) -> None:
        victim = self.policy.victim()
        assert self.policy.victim() == victim


def insert(policy: EvictionPolicy, *keys: bytes, used: int = 0) -> None:
    for age, key in enumerate(keys):
        policy.inserted(key, None)
        policy.released(key, used + len(keys) - age)


def hit(policy: EvictionPolicy, *keys: bytes, times: int = 1) -> None:
    for _ in range(times):
        for key in keys:
            policy.hit(key, 0, RequestContext())


def evict(policy: EvictionPolicy, blocks: int) -> list[bytes]:
    """The next victims, in their order."""
    left = []
    for _ in range(blocks):
        key = policy.victim()
        assert key is not None
        policy.evicted(key)
        left.append(key)
    return left


def names(text: str) -> list[bytes]:
    return [each.encode() for each in text]
