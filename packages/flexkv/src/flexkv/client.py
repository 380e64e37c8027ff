# SPDX-License-Identifier: Apache-2.0
"""CacheClient, the door between an engine's adapter and a cache.

Only plain data crosses it: no live object and no callback. So the cache may be in this process, or
in another one.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NewType, Protocol

from flexkv.eviction import UNKNOWN_REQUEST, RequestContext
from flexkv.figures.counters import ResetCause
from flexkv.figures.meter import Figures
from flexkv.types.changes import Changes, Medium
from flexkv.types.mover import Direction
from flexkv.types.presence import Presence


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks that workers copy between the arena and the engine's pages, as the direction is seen
    from the pages. Each transfer of a cache has a greater id than those before. The ranks report in
    `cell` of the completion board. `keys` are in the order of the prefix, and nobody changes them;
    `slots` are those of the arena, for each key."""

    id: int
    direction: Direction
    cell: int
    keys: Sequence[bytes]
    slots: Sequence[int]


class Ended(NamedTuple):
    """The end of a transfer. `done` says whether all ranks have copied all blocks; if not, the
    transfer has failed."""

    id: int
    direction: Direction
    done: bool


class TransferEnd(enum.Enum):
    """How the caller of `CacheClient.end_transfer` ends a transfer."""

    CONFIRM = enum.auto()
    """The bytes of a held store are right: `poll` returns it once its ranks have reported."""
    CANCEL = enum.auto()
    """No worker knows the transfer: its blocks are released, and `poll` does not return it."""
    DISCARD = enum.auto()
    """Bytes of a store are wrong, or the engine has overwritten their pages: lookups never find the
    blocks. `poll` returns the store."""


class Hold(enum.Enum):
    """Why blocks stay in the arena."""

    PIN = enum.auto()
    """Pinned blocks stay until `CacheClient.unhold`, at most half of the arena."""
    RETAIN = enum.auto()
    """A client has asked for it: at most a quarter of the arena, and an eighth for one owner."""


class Reset(enum.Enum):
    """What `CacheClient.reset` does. Blocks of stores under way are not published after any but
    SUSPEND and RECOVER. Later polls free the slots of what is forgotten."""

    SUSPEND = enum.auto()
    """Disable lookups, loads and stores until CLEAR, EMPTY or RENEW: all blocks may be outdated."""
    CLEAR = enum.auto()
    """Forget every block, in lower tiers too. A cache that others share keeps theirs."""
    EMPTY = enum.auto()
    """Forget every block, but leave shared stores theirs, which others still find. Keys keep their
    meaning, so that later processes find what is stored from now on. A cache that others share
    keeps all blocks."""
    RENEW = enum.auto()
    """Forget the blocks in host memory, because the caller names its blocks by other keys from now
    on. Blocks below stay for other engines, and for later processes that use these keys."""
    PAUSE = enum.auto()
    """The engine pauses and may free its pages, and has the same weights afterwards. All blocks
    stay but those being stored, whose pages may be gone before they are read."""
    STOP = enum.auto()
    """Load and store nothing from now on, and forget the blocks in host memory. Blocks on disk stay
    for the next process. Further calls do nothing, unless this raises."""
    RECOVER = enum.auto()
    """After an error that may have lost a lease or a copy: store and fetch nothing until the lower
    tiers have ended what they do or hang, and go on with the blocks that are ready. Later polls do
    that. Methods that raise recover themselves; a caller that may have lost a fetch by an error
    recovers, and cancels the transfers that it has lost."""


MOST_PRIORITY = 100
"""The highest priority of a request; the lowest is as far below 0."""

FetchId = NewType("FetchId", int)
"""Number of a fetch; each fetch of a cache has a greater one than those before."""


class AwaitedBlocks(NamedTuple):
    """Consecutive blocks that the arena lacked when their fetch began, by their positions in the
    keys of the fetch: from `start` to before `stop`. `medium` is that of the tier that gave them,
    is expected to give them, or is queried about them; HOST if the engine stores them, or if no
    tier has given them."""

    start: int
    stop: int
    medium: Medium


@dataclass(frozen=True, slots=True)
class FetchState:
    """A fetch as of the last poll. Times are time.monotonic(), in seconds. Nobody changes the
    mappings and sequences.

    Attributes:
        begun: when the fetch began. If its first blocks were announced and no tier had them then,
            when a tier got them.
        length: how many blocks the fetch is to bring, those that the arena had included.
        first: how many blocks the arena had when the fetch began, from the first on.
        arrived: how many blocks the arena has, from the first on without a gap. They stay there
            until `CacheClient.end_fetch`.
        stop: how many blocks have arrived or can still arrive, from the first on. The number falls
            when a block fails or no tier has the block.
        queried: medium of the first tier that is queried about further blocks; None if none is.
        missing: how many blocks each tier may still give.
        gave: how many blocks each tier has given, and when it gave the last.
        next_medium: medium of the tier that is expected to give the next block; None if unknown.
        awaited: the blocks that the arena lacked when the fetch began and that could come, in
            order.
        reach: how many blocks could come if the arena had room for all, from the first on.
        later: those of them behind `stop` that the arena lacks, in order.
    """

    begun: float
    length: int = 0
    first: int = 0
    arrived: int = 0
    stop: int = 0
    queried: Medium | None = None
    missing: Mapping[Medium, int] = field(default_factory=dict)
    gave: Mapping[Medium, tuple[int, float]] = field(default_factory=dict)
    next_medium: Medium | None = None
    awaited: Sequence[AwaitedBlocks] = ()
    reach: int = 0
    later: tuple[AwaitedBlocks, ...] = ()

    @property
    def is_short(self) -> bool:
        """Whether further blocks could come, for which the arena has no room now."""
        return self.reach > self.stop

    @property
    def unbounded(self) -> FetchState:
        """The state as if the arena had room for all blocks."""
        missing = Counter(self.missing)
        for start, stop, medium in self.later:
            missing[medium] += stop - start
        return replace(self, stop=max(self.stop, self.reach), missing=missing)

    def since(self, at: float, then: FetchState) -> FetchState:
        """The state as if the fetch had begun at the time `at`, when its state was `then`."""
        gave = {
            medium: (count - before, last)
            for medium, (count, last) in self.gave.items()
            if (before := then.gave.get(medium, (0, 0.0))[0]) < count
        }
        begun, first = max(self.begun, at), max(self.first, then.arrived)
        return replace(self, begun=begun, first=first, gave=gave)

    @property
    def done(self) -> bool:
        """Whether no further block can arrive."""
        return self.arrived >= self.stop

    @property
    def seconds_left(self) -> float:
        """Seconds that the remaining blocks take at the pace of those that have arrived; infinite
        if none has arrived."""
        if self.done:
            return 0.0
        came = self.arrived - self.first
        seconds = time.monotonic() - self.begun
        return seconds * (self.stop - self.arrived) / came if came else math.inf

    @property
    def is_steady(self) -> bool:
        """Whether each tier that may still give blocks has them for certain, and has given some.
        Only then does `seconds_left` hold for all tiers."""
        return self.queried is None and self.missing.keys() <= self.gave.keys()


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What does not change while a cache is open, unless it attaches to another service.

    Attributes:
        slot_bytes: bytes of a block in every tier, padding included.
        media: media of the lower tiers, the fastest first.
        must_query: whether a lower tier needs a query to know which blocks it has.
        is_shared: whether other engines use the cache. Then `clear` leaves them their blocks, and
            the caller has to name its own by other keys.
        drops_old: whether polls remove blocks because of their age, so that somebody has to poll
            while the engine is idle, too.
        takes_tenants: whether tenants have shares and the engine has no tenant of its own, so that
            `store` and `fetch` need those of requests.
    """

    num_slots: int
    slot_bytes: int
    media: tuple[Medium, ...]
    must_query: bool
    policy_name: str
    is_shared: bool = False
    drops_old: bool = False
    takes_tenants: bool = False

    @property
    def has_store(self) -> bool:
        """Whether one of the lower tiers is shared with other nodes."""
        return any(medium.is_shared for medium in self.media)

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch may bring blocks: from a lower tier, or from another engine that stores
        them."""
        return self.is_shared or bool(self.media)


class CacheStatus(NamedTuple):
    """What a cache can do now.

    Attributes:
        disabled: whether lookups find nothing and no load or store begins: after an error of a
            rank, or while it is suspended.
        is_full: whether the arena has no free slot, so that a store evicts.
        is_silent: whether the process of the service is gone, or owes an answer for too long. What
            it has yet to do may never be done.
        awaits_slots: whether a store gets no slot now, and the service may grant some soon.
        has_changes: whether `drain_changes` may return any.
        awaits_changes: whether blocks that count as changes after `watch` have yet to come from the
            service.
        under_way: the transfers that `poll` has not returned, by id.
        publishing: ids of the stores that `poll` has returned and whose blocks the service has yet
            to publish. Lookups find them then.
    """

    disabled: bool
    is_full: bool
    is_silent: bool
    awaits_slots: bool
    has_changes: bool
    awaits_changes: bool
    under_way: Mapping[int, Transfer]
    publishing: Collection[int]

    @property
    def loading_blocks(self) -> int:
        """The number of blocks in the loads under way."""
        blocks = 0
        for each in self.under_way.values():
            if each.direction is Direction.LOAD:
                blocks += len(each.slots)
        return blocks


class CacheClient(Protocol):
    """A cache as an engine's adapter calls it. Single-threaded; nothing but `close` waits."""

    @property
    def info(self) -> CacheInfo:
        """What does not change, but for another service."""

    @property
    def busy(self) -> bool:
        """Whether anything is under way whose end `poll` may find."""

    @property
    def status(self) -> CacheStatus:
        """What the cache can do now."""

    def lookup(self, keys: Sequence[bytes]) -> int:
        """The number of blocks that can be loaded, from the first key on. No side effect."""

    def presence(self, keys: Sequence[bytes]) -> Sequence[Presence]:
        """The place of the block of each key, in the order of `keys`. No side effect."""

    def where(self, keys: Sequence[bytes]) -> Mapping[Medium, Sequence[bool | None]]:
        """For each tier, the fastest first, which of the blocks it has now; None where it has to be
        queried. Takes O(tiers) per key. No side effect; any thread may call it."""

    def missing(self, keys: Sequence[bytes], start: int = 0) -> list[int]:
        """Positions, from `start` on, of the keys whose blocks have no slot. No side effect."""

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> bool:
        """Query the lower tiers that do not know which blocks of a prefix they have. Returns
        whether an answer is awaited; it arrives within each tier's deadline. `scattered`: keys of
        further blocks, with gaps; of no use without the first of `keys`."""

    def load(self, keys: Sequence[bytes]) -> Transfer | None:
        """Lease the blocks of `keys` for a copy into the engine, until `poll` reports its end or
        `end_transfer` cancels it. The caller does not change `keys` afterwards. None, a miss, if a
        block is not ready or too many transfers are under way."""

    def fetch(
        self,
        keys: Sequence[bytes],
        *,
        queued: bool = False,
        tenant: int | None = None,
        announced: int = 0,
        priority: int = 0,
    ) -> FetchId | None:
        """Bring the blocks of a prefix, from some block on, from lower tiers into the arena, where
        `lookup` finds them, or wait for other engines that are storing them there.

        Args:
            queued: whether the request is still queued. The fetch then yields to those of requests
                that wait, and leaves half of the arena to others.
            tenant: number of the tenant for whom the blocks count; None for the engine's own.
            announced: how many of the blocks, from the first on, another node writes to a shared
                store, as somebody has told. The fetch waits for them for some seconds at most.
            priority: of the request, from -`MOST_PRIORITY` to `MOST_PRIORITY`. Among requests that
                wait, and among those that are queued, tiers read for the highest first.

        Returns None if no lower tier has a block to add. Blocks stay in the arena until the caller
        calls `end_fetch`.
        """

    def extend_fetch(
        self, fetch: FetchId, keys: Sequence[bytes] = (), *, raise_priority: bool = False
    ) -> bool:
        """Let a fetch bring the blocks behind its prefix, too, in order: beginning a long fetch at
        once takes longer than a step of an engine may. Without keys, look for room again. With
        `raise_priority`, a request waits from now on for a fetch that began as `queued`. Returns
        whether the fetch can be extended further. If not, no tier has a block to add, or the fetch
        has ended."""

    def fetch_state(self, fetch: FetchId) -> FetchState:
        """The state of a fetch. A fetch that has ended, also by an error or a reset, has no block
        and is done."""

    def end_fetch(self, fetch: FetchId) -> FetchState:
        """End a fetch and release its blocks, whether or not they have arrived. Idempotent. Returns
        the last state of the fetch."""

    def store(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Collection[int] = (0,),
        *,
        held: bool = False,
        tenants: Sequence[int] | None = None,
    ) -> Transfer | None:
        """Reserve slots for blocks of one prefix, or of several prefixes in a row. No block of them
        is evicted to make room. A block whose predecessor is not in the arena is not stored.

        Args:
            keys: keys of blocks, each of which builds on the one before. They may begin anywhere in
                the prefix, at the latest one block before the first to store. The caller does not
                change them afterwards.
            positions: positions in `keys` of the blocks to store, ascending. Blocks that have a
                slot are left out.
            prefix_starts: positions of blocks that begin a prefix.
            held: whether `poll` passes over the transfer until `end_transfer` confirms it, because
                the caller does not know yet whether the bytes to store are right.
            tenants: for each of `keys` the number of the tenant for whom its block counts; None
                for the engine's own.

        Returns a transfer of the blocks that got a slot, in order, which ends by `poll` or
        `end_transfer`; None if no block got one.
        """

    def end_transfer(
        self, transfer_id: int, end: TransferEnd, positions: Collection[int] | None = None
    ) -> None:
        """End a load or store otherwise than by the reports of its ranks; see `TransferEnd`. Does
        nothing if it is not under way. `positions` are those, in the transfer's `keys`, of the
        blocks to discard; None for all."""

    def record(
        self,
        keys: Sequence[bytes],
        context: RequestContext = UNKNOWN_REQUEST,
        prompt: Sequence[bytes] | None = None,
    ) -> None:
        """Count the use of a prefix by a scheduled request in all tiers, and offer its blocks to
        lower tiers, whose admission decides. Called once for each request. Later polls do the
        counting, because a prefix may be long.

        `keys`: of the blocks that the request found in any cache, the engine's own included.
        `prompt`: of all blocks of its prompt, found or not; None if they are unknown.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the use of a prefix, found or computed, by a request that ends. Every tier evicts
        the end of the prefix before its beginning. Later polls do the counting."""

    def ended(self, request_id: str, output_tokens: int) -> None:
        """Report the end of the recorded request with this id to the eviction policy."""

    def hold(
        self,
        kind: Hold,
        keys: Sequence[bytes],
        owner: Hashable = None,
        seconds: float | None = None,
    ) -> None:
        """Keep the blocks of a prefix that are in the arena or being stored or fetched, as long as
        one owner holds them, for `seconds` from the last call on; None for the time of pins in the
        settings. Blocks beyond the limit of the kind are not kept, and are counted."""

    def unhold(self, kind: Hold, owner: Hashable = None, keys: Sequence[bytes] = ()) -> bool:
        """End all pins of `owner`, or what `hold` has retained of `keys` for it. Returns whether
        the owner has pinned blocks since its last `unhold`; a cache that is not the service's knows
        whether a pin of them is left. False for retained blocks."""

    def demote(self, keys: Sequence[bytes]) -> None:
        """Write the blocks of a prefix to lower tiers, and evict those that are there then: the end
        of the prefix first, without blocks that others build on, use or hold. Later polls do that.
        Does nothing without a lower tier. The keys of several prefixes may follow each other."""

    def poll(self) -> list[Ended]:
        """Process the reports of ranks and lower tiers: publish stored blocks, release loaded ones.
        Returns the loads and stores that have ended. If this raises, the next call returns them."""

    def watch(self, *, lower: bool = False) -> None:
        """Record changes for `drain_changes` from now on. All present blocks count as changes, also
        if it is called again: the reader knows of none. `lower`: only blocks below host memory
        count as changes again."""

    def drain_changes(self) -> list[Changes]:
        """What changed since the last call: blocks that became loadable or ceased to be, each at
        most once, removals first within a medium. A block that came and left meanwhile is not among
        them. Many changes take several calls, the oldest first; see `CacheStatus`. Empty without
        `watch`. If an error may have lost some, this raises until `watch` is called again."""

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        """Keep descriptions of blocks on disk beside them, over restarts: what events say of a
        block, in the caller's own format. Best effort, written later; blocks that are not there are
        skipped. A cache that others share (`CacheInfo.is_shared`) keeps those of blocks in host
        memory, too, and of blocks that are about to be stored: it gives them to the others."""

    def figures(self) -> Figures:
        """All that engines report of the cache: totals since its start, and gauges."""

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove the blocks of `keys` that are ready, from host memory and from disks, pinned or
        not. In host memory, blocks that build on them leave, too. Shared stores keep theirs, and so
        does a cache that others share. Returns how many of them may still come, because they are
        being stored, fetched, or written to a tier. If there are any, the caller calls again after
        some polls."""

    def sync(self) -> list[Future[str]]:
        """Have the disks keep all removals and resets so far over a power failure; see
        `IndexedTier.sync`. A cache that others share has no disks of its own."""

    def reset(self, kind: Reset, cause: str = ResetCause.REQUEST) -> None:
        """Change the state of the whole cache; see `Reset`. If a clear, empty or renew raises, the
        cache stays suspended. `cause` is one of `ResetCause`, for the metrics of a clear or a
        renew."""

    def close(self, flush_seconds: float = 0.0) -> bool:
        """Process the last reports and close the lower tiers, which may write waiting blocks for
        `flush_seconds`. False if a tier hangs: it may still write to the arena, which must then
        stay mapped. Errors are logged, never raised."""
