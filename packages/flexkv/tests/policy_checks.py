# SPDX-License-Identifier: Apache-2.0
"""A policy that notes the lives of blocks and checks that index and policy keep to them."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.eviction import EvictionPolicy, RequestContext


class CheckedPolicy:
    """Passes every call on to `policy`.

    Attributes:
        evictable: when each block that is not held was used last.
        held_blocks: the blocks that are held.
        hits: of the blocks that are there, held or not.
        prompts: of requests that began, with how many blocks were there.
        answers: tokens of those that ended, by id.
        stale: blocks that a reset has dropped, and that have not been evicted since.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.evictable: dict[bytes, int] = {}
        self.held_blocks: set[bytes] = set()
        self.hits: dict[bytes, list[RequestContext]] = {}
        self.prompts: list[tuple[list[bytes], int, RequestContext]] = []
        self.answers: dict[str, int] = {}
        self.stale: set[bytes] = set()

    def began(self, keys: Sequence[bytes], ready: int, context: RequestContext, now: float) -> None:
        assert all(key in self.hits for key in keys[:ready])
        assert ready == len(keys) or keys[ready] not in self.hits.keys() - self.stale
        self.prompts.append((list(keys), ready, context))
        self.policy.began(keys, ready, context, now)

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

    def clear(self) -> None:
        for known in (self.evictable, self.held_blocks, self.hits, self.stale):
            known.clear()
        self.policy.clear()
