# SPDX-License-Identifier: Apache-2.0
"""FlexKV's own policy: keep what is likely to come back soon for the time that it is kept.

What tells whether a block comes back is the request that it came from: which turn of a
conversation, how long, how much of it was new, how long the answer, and how long ago. How soon
blocks of each such class come back is learned while they are served (`rates`). The block that
leaves is the one of which the fewest hits are expected per second of keeping it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from zlib import crc32

from flexkv.eviction.base import EvictionPolicy, RequestContext
from flexkv.eviction.rates import ReturnRates
from flexkv.eviction.segments import Request, Segment, SegmentTable

_GHOST_SHARE = 16
"""Blocks that have left are remembered: 16 times as many as the tier has. They show which requests
go on with earlier ones, and what would have come back had it been kept."""

_GHOST_SAMPLE = 8
"""An eighth of their keys is kept, and the last of each segment, which is where most go on."""

_SEGMENT_SHARE = 2
"""And segments, which may have one block each, twice as many as the tier has blocks."""

_LEAST_CAPACITY = 256
"""Before the tier has so many blocks, as much is remembered as if it had."""

_LEARN_REQUESTS = 50
_LEARN_SHARE = 16
_LEARN_MOST = 1000
"""Rates are learned anew after so many requests, or a 16th of all so far, up to a thousand."""

_MOST_RUNNING = 1 << 16
_MOST_SESSIONS = 1 << 16

_BODY, _TRUNK, _SUPERSEDED = 0, 3, 6
_KINDS, _OUTPUTS, _TURNS, _BLOCKS, _NEW, _CHILDREN, _PARTS = 7, 5, 6, 12, 8, 12, 3
_WHOLE, _OLD, _FRESH = range(3)
_USUAL_OUTPUT = 3
"""What a request that runs is taken to answer: up to 256 tokens."""
_NO_HINT, _RETURNS, _LEAVES, _SESSION = range(4)

_PRIORS = [[1.0] * n for n in (_KINDS, _OUTPUTS, _TURNS, _BLOCKS, _NEW, _CHILDREN, _PARTS)]
_PRIORS += [[1.0, 3.0, 0.1, 1.5]]
"""What levels of each factor are expected to do. Hints are believed until they prove wrong."""


class HazardPolicy(EvictionPolicy):
    """Learns when blocks come back. See `EvictionPolicy`.

    The blocks of a prompt are split into segments: pieces of a trunk, each up to a block where
    prompts of others go on differently; the rest of what was known before; and what is new. A block
    belongs to the last request that used it. If a later request uses only the beginning of a
    segment, the rest is superseded. A block that is worth less than all others is not admitted.

    Amortised O(1) a block. Deterministic: the time is passed in.
    """

    def __init__(self) -> None:
        self._rates = ReturnRates(_PRIORS)
        self._begin()

    def _begin(self) -> None:
        self._table = SegmentTable(self._rates)
        self._known: dict[bytes, Segment] = {}
        self._pending: dict[bytes, Segment] = {}  # not in the tier, or not yet
        self._forks: dict[bytes, int] = {}
        self._order: OrderedDict[Segment, None] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._sessions: OrderedDict[str, Request] = OrderedDict()
        self._newcomer: tuple[Segment | None, float] = (None, 0.0)
        self._followed = 0  # blocks of all segments
        self._blocks = 0
        self._capacity = 0  # the most blocks that there were at once
        self._now = 0.0
        self._requests = 0
        self._learns_at = _LEARN_REQUESTS

    def began(self, keys: Sequence[bytes], ready: int, context: RequestContext, now: float) -> None:
        if not keys or context.request_id in self._running:  # it was preempted
            return
        self._now = max(now, self._now)
        self._newcomer = (None, 0.0)
        known = self._known_blocks(keys)
        request = self._make_request(keys, known, context)
        segments = request.segments
        if known < len(keys):
            part = _FRESH if known else _WHOLE
            body = min(request.turn, 2)
            segments.append(Segment(request, known, len(keys), _BODY + body, part=part))
        leaves = self._take_over(keys, known, ready, request)
        for segment in segments:
            leaves += self._own(segment, keys, ready, ghosts=known > ready)
        for leaf in leaves:
            self._add_leaf(self._owner(leaf), leaf)
        self._trim_pending()
        self._requests += 1
        if self._requests >= self._learns_at:
            self._learns_at += min(
                max(_LEARN_REQUESTS, self._requests // _LEARN_SHARE), _LEARN_MOST
            )
            self._table.learn(self._now)
        self._expire()

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        self._now = max(now, self._now)
        request = self._running.pop(request_id, None)
        if request is None:
            return
        output = _output_level(output_tokens)
        for segment in request.segments:
            if segment.slot >= 0 and segment.kind != _SUPERSEDED:
                self._place(segment, output)
        request.segments = []

    def inserted(self, key: bytes, after: bytes | None) -> None:
        segment = self._pending.pop(key, None)
        if segment is None or segment.slot < 0:
            before = None if after is None else self._known.get(after)
            if before is None or before.slot < 0:
                segment = self._adopt()
            else:
                segment = before  # of an answer, or of another group of layers
                segment.stop += 1
                self._followed += 1
                self._table.resize(segment)
        self._known[key] = segment
        segment.cached += 1
        self._blocks += 1
        self._capacity = max(self._capacity, self._blocks)

    def held(self, key: bytes) -> None:
        self._owner(key).leaves.pop(key, None)

    def released(self, key: bytes, used: int) -> None:
        self._add_leaf(self._owner(key), key)

    def evicted(self, key: bytes) -> None:
        self._blocks -= 1
        segment = self._owner(key)
        segment.leaves.pop(key, None)
        segment.cached -= 1
        is_last = segment.cached == segment.stop - segment.start - 1
        if segment.slot >= 0 and (is_last or _is_sampled(key) or key in self._forks):
            segment.ghosts.append(key)
        else:
            del self._known[key]
            self._forks.pop(key, None)
        if segment.cached <= 0 and segment.slot >= 0:
            if segment.request is _NOBODY:
                self._forget(segment)
            elif not segment.leaves:
                segment.leaves = {}  # one that was used is three times as large

    def victim(self, newcomer: bytes | None = None) -> bytes | None:
        segment = self._table.lowest(self._now)
        if segment is None:
            return None
        if newcomer is not None and self._worth_of(newcomer) < segment.rank:
            return None
        return next(iter(segment.leaves))

    def clear(self) -> None:
        self._begin()

    def _known_blocks(self, keys: Sequence[bytes]) -> int:
        """How many blocks of a prompt are known, in the tier or not."""
        count = len(keys)
        while count and keys[count - 1] not in self._known and keys[count - 1] not in self._pending:
            count -= 1
        return count

    def _make_request(self, keys: Sequence[bytes], known: int, context: RequestContext) -> Request:
        turn, blocks = 0, len(keys)
        before = self._sessions.pop(context.session, None) if context.session else None
        if before is not None:
            turn = before.turn + 1
        if known:
            last = keys[known - 1]
            parent = (self._known.get(last) or self._pending[last]).request
            if known > 1 and known >= parent.blocks:
                turn = max(turn, parent.turn + 1)
            if known < blocks and (known < parent.blocks or last in self._forks):
                self._forks[last] = self._forks.get(last, 1) + 1
        new = min((blocks - known).bit_length(), 5) if turn else 6 + (known > 1)
        levels = (_turn_level(turn), _log2(blocks), new)
        request = Request(context, turn, blocks, levels)
        if context.request_id:
            self._running[context.request_id] = request
            if len(self._running) > _MOST_RUNNING:
                del self._running[next(iter(self._running))]
        if context.session:
            self._sessions[context.session] = request
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return request

    def _take_over(
        self, keys: Sequence[bytes], known: int, ready: int, request: Request
    ) -> list[bytes]:
        """Make segments of the known blocks of a prompt, which belong to others so far. Returns
        those that are in the tier and not held."""
        leaves: list[bytes] = []
        segment: Segment | None = None
        stop = known
        while stop > 0:
            last = keys[stop - 1]
            owner = self._known.get(last) or self._pending.get(last)
            if owner is not None and owner.request is _NOBODY and owner.blocks == 1:
                owner.start, owner.stop = stop - 1, stop  # its place in a prompt is known now
            if owner is None or owner.slot < 0 or not owner.start < stop <= owner.stop:
                owner, start = None, stop - 1
            else:
                start = owner.start
            children = self._forks.get(last, 1)
            if children > 1 or segment is None:
                kind = _BODY + min(request.turn, 2)
                if children > 1:
                    kind = _TRUNK + (children >= 4) + (children >= 16)
                segment = Segment(request, start, stop, kind, _log2(children), _OLD)
                request.segments.append(segment)
            segment.start = start
            if owner is not None:
                leaves += self._take_from(owner, stop, max(0, min(ready, stop) - start))
            stop = start
        return leaves

    def _take_from(self, owner: Segment, stop: int, cached: int) -> Iterable[bytes]:
        """A request has used the blocks of a segment up to `stop`, of which `cached` are in the
        tier. Returns those that are not held; they may be of either part."""
        share = (stop - owner.start) / owner.blocks
        age = self._now - owner.born
        self._rates.note(owner.number, age, owner.weight, owner.weight * share)
        leaves, owner.leaves = owner.leaves, {}
        owner.cached -= cached
        if stop >= owner.stop:
            self._remove(owner)
        else:
            self._followed -= stop - owner.start
            owner.start = stop
            owner.kind, owner.children, owner.part = _SUPERSEDED, 0, 0
            self._table.resize(owner)
            self._order.move_to_end(owner)
            self._place(owner, 0)
        return leaves

    def _own(
        self, segment: Segment, keys: Sequence[bytes], ready: int, *, ghosts: bool
    ) -> list[bytes]:
        """The blocks of a segment belong to it from now on. Returns those of them that are not held
        and that a segment still has which nothing was taken from: keys that are no chain."""
        start, stop = segment.start, segment.stop
        middle = min(max(start, ready), stop)
        segment.cached = middle - start
        there = dict.fromkeys(keys[start:middle], segment)
        leaves: list[bytes] = []
        for owner in dict.fromkeys(map(self._known.get, there)):
            if owner is not None and owner.leaves:
                own = [key for key in owner.leaves if key in there]
                owner.leaves = dict.fromkeys(key for key in owner.leaves if key not in there)
                leaves += own
        self._known.update(there)
        lacking = keys[middle:stop]
        if lacking:
            self._pending.update(dict.fromkeys(lacking, segment))
            if ghosts:
                for key in lacking:
                    old = self._known.get(key)
                    if old is not None and key not in old.leaves:
                        self._known[key] = segment
                        segment.ghosts.append(key)
        self._enter(segment, _USUAL_OUTPUT)
        return leaves

    def _enter(self, segment: Segment, output: int) -> None:
        self._followed += segment.blocks
        self._order[segment] = None
        self._table.add(segment)
        self._place(segment, output)

    def _remove(self, segment: Segment) -> None:
        self._followed -= segment.blocks
        del self._order[segment]
        self._table.remove(segment)

    def _place(self, segment: Segment, output: int) -> None:
        """Find the class of a segment, whose age begins."""
        turn, blocks, new = segment.request.levels
        if segment.kind == _SUPERSEDED:
            factors = (_SUPERSEDED, 0, turn, 0, 0, 0, 0, 0)
        else:
            hint = _hint_level(segment.request.context)
            factors = segment.kind, output, turn, blocks, new, segment.children, segment.part, hint
        self._table.place(segment, self._rates.class_of(factors), self._now)

    def _owner(self, key: bytes) -> Segment:
        """The segment of a block in the tier."""
        segment = self._known.get(key)
        if segment is None or segment.slot < 0:
            segment = self._known[key] = self._adopt()
            segment.cached = 1
        return segment

    def _adopt(self) -> Segment:
        """A segment for one block of an unknown request."""
        segment = Segment(_NOBODY, 0, 1, _SUPERSEDED)
        self._enter(segment, 0)
        return segment

    def _add_leaf(self, segment: Segment, key: bytes) -> None:
        leaves = segment.leaves
        if leaves:
            leaves[key] = None
        else:
            leaves[key] = None
            self._table.open(segment, self._now)

    def _worth_of(self, newcomer: bytes) -> float:
        """What a block is worth that is not in the tier yet. Blocks of a segment come together."""
        segment = self._pending.get(newcomer)
        if segment is None or segment.slot < 0:
            return float("inf")
        known, worth = self._newcomer
        if segment is not known:
            worth = self._table.worth(segment, self._now)
            self._newcomer = segment, worth
        return worth

    def _expire(self) -> None:
        """Forget the blocks that left longest ago."""
        blocks = (1 + _GHOST_SHARE) * max(self._capacity, _LEAST_CAPACITY)
        segments = _SEGMENT_SHARE * max(self._capacity, _LEAST_CAPACITY)
        left = len(self._order)
        while (self._followed > blocks or len(self._order) > segments) and left:
            left -= 1
            segment = next(iter(self._order))
            if segment.cached > 0 or segment.leaves:
                self._order.move_to_end(segment)
                continue
            self._rates.note(segment.number, self._now - segment.born, segment.weight, 0.0)
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        """Nothing is remembered of the blocks of a segment, none of which is in the tier."""
        self._remove(segment)
        for key in segment.ghosts:
            if self._known.get(key) is segment:
                del self._known[key]
                self._forks.pop(key, None)

    def _trim_pending(self) -> None:
        """Remember of blocks that have not come what is remembered of those that have left."""
        if len(self._pending) <= 2 * self._capacity + _MOST_RUNNING:
            return
        items = iter(self._pending.items())
        for key, segment in islice(items, len(self._pending) // 2):
            if key in self._known:
                continue
            if segment.slot >= 0 and _is_sampled(key):
                self._known[key] = segment
                segment.ghosts.append(key)
            else:
                self._forks.pop(key, None)
        self._pending = dict(items)


_NOBODY = Request(RequestContext(), turn=0, blocks=1, levels=(0, 0, 0))


def _is_sampled(key: bytes) -> bool:
    return crc32(key) % _GHOST_SAMPLE == 0


def _log2(count: int) -> int:
    return min(count.bit_length() - 1, _BLOCKS - 1)


def _turn_level(turn: int) -> int:
    return turn if turn < 3 else 3 + (turn >= 5) + (turn >= 9)


def _output_level(tokens: int) -> int:
    return (tokens >= 4) + (tokens >= 16) + (tokens >= 64) + (tokens >= 256)


def _hint_level(context: RequestContext) -> int:
    if context.returns is not None:
        return _RETURNS if context.returns else _LEAVES
    return _SESSION if context.session else _NO_HINT
