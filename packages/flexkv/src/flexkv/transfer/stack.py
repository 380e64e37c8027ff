# SPDX-License-Identifier: Apache-2.0
"""All copies between the arena and the tiers below it.

Each tier has its own links, with their own threads. Every link runs urgent jobs first (`Priority`)
and bounds the jobs that wait. A fetch gives a stalled tier up.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from flexkv.eviction import RequestContext
from flexkv.figures.counters import TierCounters
from flexkv.figures.definitions import FETCH_SECONDS, TierReading
from flexkv.figures.meter import Meter
from flexkv.index.block_index import Block, BlockIndex, BlockRow
from flexkv.tiers.base import AttachedTier, IndexedTier
from flexkv.tiers.circuit import CircuitState
from flexkv.transfer.demote import Demoter, EvictionWriteback, PrefixDemotions
from flexkv.transfer.fetcher import Fetcher
from flexkv.transfer.sources import KeptBlocks, Source
from flexkv.types.backlog import share_of
from flexkv.types.changes import Changes, Medium, changes_of

logger = logging.getLogger(__name__)

_COUNTED_BLOCKS = 32
"""The least number of blocks whose uses one poll counts: about 0.03 ms with a disk of a million
slots."""


@dataclass(slots=True)
class _Use:
    """A used prefix. Its first `left` blocks are not counted yet."""

    keys: Sequence[bytes]
    left: int
    hit: RequestContext | None
    lacking: list[Demoter] = field(default_factory=list)
    """The writers of tiers that lack a block of the prefix that the arena has."""
    then: Callable[[], None] | None = None
    """Called when the prefix is counted."""


class PrefixAccesses:
    """Counts the uses of prefixes in every tier, in the order in which they were noted. A long
    prompt has more blocks than one step of the engine has time for. So `note` records a use at
    once, and each poll counts some of its blocks. Single-threaded.

    `tiers` count uses. `demoters` are the writers of the tiers that are offered each prefix that a
    request found, if they lack a block of it. `waiting` has the uses of which a block is not
    counted yet."""

    def __init__(
        self, index: BlockIndex, tiers: Sequence[IndexedTier], demoters: Sequence[Demoter]
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._demoters = demoters
        self.waiting: deque[_Use] = deque()
        self._backlog = 0

    def note(self, keys: Sequence[bytes], hit: RequestContext | None) -> None:
        """Note the use of a prefix. `hit` is the scheduled request that found the prefix, None if a
        request ends that made the prefix, or whose hit was noted before."""
        if keys:
            self.waiting.append(_Use(keys[:], len(keys), hit))
            self._backlog += len(keys)

    def call_after(self, call: Callable[[], None]) -> None:
        """Make a call once all uses that are noted so far are counted."""
        self.waiting.append(_Use((), 0, None, then=call))

    def count(self) -> None:
        """Count some of the noted blocks. The last block of a prefix is counted first, so that it
        is evicted first."""
        blocks = share_of(self._backlog, _COUNTED_BLOCKS) if self.waiting else 0
        while self.waiting and blocks > 0:
            use = self.waiting[0]
            stop, use.left = use.left, max(0, use.left - blocks)
            part = use.keys[use.left : stop]
            blocks -= len(part)
            self._backlog -= len(part)
            self._count_part(use, part)
            if use.left == 0:
                self.waiting.popleft()
                for demoter in use.lacking:
                    demoter.complete(use.keys)
                if use.then is not None:
                    use.then()

    def clear(self) -> None:
        """Discard all noted uses, because the arena was cleared."""
        self.waiting.clear()
        self._backlog = 0

    def _count_part(self, use: _Use, part: Sequence[bytes]) -> None:
        if use.hit is None:
            self._index.touch(part)
        else:
            self._index.hit(part, use.hit)
        for tier in self._tiers:
            tier.touch(part)
        for demoter in self._demoters if use.hit is not None else ():
            if demoter not in use.lacking and demoter.lacks_any(part):
                use.lacking.append(demoter)


class TierStack:
    """The tiers below one arena, the fastest first; owned. Single-threaded; nothing waits but
    `close`. Blocks are leased, reserved and published in the index of the arena. The caller reports
    requests to the `indexed` ones, which know their blocks."""

    def __init__(
        self,
        index: BlockIndex,
        slot_view: Callable[[int], memoryview],
        tiers: Sequence[AttachedTier],
        meter: Meter,
    ) -> None:
        self._index = index
        self.tiers = [each.tier for each in tiers]
        self._sources = [
            Source(each.tier, tier_rank, each.stall_seconds) for tier_rank, each in enumerate(tiers)
        ]
        self._writeback = EvictionWriteback(index)
        self._demoters = [
            Demoter(index, slot_view, source, self._writeback) for source in self._sources
        ]
        admitted = [(each, of.admission) for each, of in zip(self._demoters, tiers, strict=True)]
        self._on_store = [each for each, admission in admitted if admission.on_store]
        self._on_evict = [each for each, admission in admitted if admission.on_evict]
        on_hit = [each for each, admission in admitted if admission.on_hit]
        self._to_stores = [each for each in self._demoters if each.source.queried is not None]
        seconds = {
            each.medium: meter.histogram(FETCH_SECONDS, each.medium.value) for each in self._sources
        }
        self.fetcher = Fetcher(
            index, slot_view, self._sources, seconds, partial(self._make_room, self._demoters)
        )
        self.indexed = [each.indexed for each in self._sources if each.indexed is not None]
        self.uses = PrefixAccesses(index, self.indexed, on_hit)
        self._demotions = PrefixDemotions(index, self._demoters, self._writeback)
        self._drains_since: float | None = None
        self._undescribed: dict[Medium, dict[bytes, bool]] = {}

    @property
    def must_query(self) -> bool:
        """Whether a tier needs a query to know which blocks it has."""
        return len(self.indexed) < len(self.tiers)

    @property
    def busy(self) -> bool:
        """Whether `poll` may find anything."""
        if self.uses.waiting or self.fetcher.busy or self._demotions.due:
            return True
        for demoter in self._demoters:  # noqa: SIM110 - `any` makes a call for each
            if demoter.busy:
                return True
        return False

    def figures(self, slot_bytes: int) -> list[TierReading]:
        """The figures of each tier, and the counts of blocks fetched from it and written to it.
        Blocks that are not offered to the tier yet count as queued."""
        figures = []
        for source, demoter in zip(self._sources, self._demoters, strict=True):
            own, waiting = source.tier.figures, demoter.waiting_blocks
            if source.left_out:
                own = replace(own, reads=_as_open(own.reads), writes=_as_open(own.writes))
            queued = replace(
                own,
                queued_blocks=own.queued_blocks + waiting,
                queued_bytes=own.queued_bytes + waiting * slot_bytes,
            )
            figures.append(TierReading(source.medium, queued, source.counters, slot_bytes))
        return figures

    @property
    def counters(self) -> list[TierCounters]:
        """The counters of each tier, the fastest first."""
        return [source.counters for source in self._sources]

    def register(self, address: int, size: int) -> None:
        """Name the memory of the slots to the tiers that move bytes by RDMA."""
        for source in self._sources:
            if source.queried is not None:
                source.queried.register(address, size)

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        """For each key whether a tier can give its block now; None if a tier has to be queried."""
        answers = [source.contains(keys) for source in self._sources]
        if len(answers) == 1:
            return answers[0]
        return [
            True if True in each else None if None in each else False
            for each in zip(*answers, strict=True)
        ]

    def reserve(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Collection[int],
        tenants: Sequence[int] | None = None,
    ) -> BlockRow:
        """Reserve slots of the arena for a store from the engine. If the arena has none to give,
        blocks give theirs up that wait to be written to a shared store. After that, blocks that a
        tier has give theirs up to those that build on them: so a prompt larger than the arena gets
        to the tier whole. The arguments are those of `BlockIndex.reserve_all`. Returns the blocks
        that got a slot, in the order of `positions`."""
        index = self._index
        first = index.reserve_all(keys, positions, prefix_starts, False, tenants)
        if len(first) == len(positions):
            return first
        blocks = list(first)
        with contextlib.ExitStack() as undo:
            undo.callback(index.abandon, blocks)
            absent = set(index.missing(keys))
            refused = [i for i in positions if i in absent]
            while refused and self._make_room(self._to_stores):
                blocks += index.reserve_all(keys, refused, prefix_starts, False, tenants)
                refused = [i for i in refused if keys[i] not in index]
            at = refused[0] if refused else 0
            if at and at not in prefix_starts and True in self.contains(keys[at - 1 : at]):
                starts = [0, *(start - at for start in prefix_starts if start > at)]
                rest = None if tenants is None else tenants[at:]
                places = [i - at for i in refused]
                blocks += index.reserve_all(keys[at:], places, starts, False, rest)
            undo.pop_all()
        if len(blocks) == len(first):
            return first
        order = {keys[i]: i for i in positions}
        return index.collect(sorted(blocks, key=lambda block: order[block.key]))

    def stored(self, keys: Sequence[bytes], ready: bool) -> None:
        """Note the end of a store from the engine; `ready`: whether it was copied."""
        self.fetcher.complete(keys)
        self._demotions.retry()
        if ready:
            for demoter in self._on_store:
                demoter.offer(keys)

    def demote(self, keys: Sequence[bytes]) -> None:
        """See `CacheClient.demote`."""
        if self._sources:
            # A use that is counted later would look as if somebody wanted the blocks again.
            self.uses.call_after(partial(self._demotions.note, list(keys)))

    def poll(self) -> None:
        """Take the results of all tiers, and begin what follows from them. Does not wait."""
        if not self._sources:
            self.uses.count()
            return
        # Before the results: a tier may drop at once what is demoted here.
        for keys, tier_rank in self.fetcher.drain_arrivals():
            self._promote(keys, tier_rank)
        reads = self.fetcher.reads
        for source, demoter in zip(self._sources, self._demoters, strict=True):
            if source.kept is not None:
                self._try_to_rejoin(source, source.kept)
                continue
            demoter.poll()
            results, demoter.reads = demoter.reads, []
            if results:
                reads.take(source, results)
        self.fetcher.poll()
        for demoter in self._demoters:
            demoter.write_waiting()
        # After the writes: in a tier, the beginning of a prefix must not be older than its end.
        # Before the victims are chosen.
        self.uses.count()
        self._demotions.follow()
        self._writeback.make_room(self._on_evict)

    def where(self, keys: Sequence[bytes]) -> dict[Medium, Sequence[bool | None]]:
        """Which of these blocks each tier has; see `Source.contains`. Any thread may call it."""
        return {source.medium: source.contains(keys) for source in self._sources}

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `CacheClient.remove`. Returns how many blocks are still to be written to tiers."""
        for tier in self.indexed:
            tier.remove(keys)
        return sum(each.holds(keys) for each in self._demoters)

    def watch(self) -> None:
        """Have all tiers that know their blocks record changes; see `IndexedTier.watch`."""
        self._undescribed.clear()
        for tier in self.indexed:
            tier.watch()

    @property
    def has_changes(self) -> bool:
        """Whether `drain_changes` may return any."""
        return bool(self._undescribed) or any(tier.has_changes for tier in self.indexed)

    def drain_changes(self, limit: int) -> list[Changes]:
        """See `IndexedTier.drain_changes`; `limit` is for each tier. If this raises, the next call
        returns the changes that it has drained."""
        for tier in self.indexed:
            if not self._undescribed.get(tier.medium):
                self._undescribed[tier.medium] = tier.drain_changes(limit)
        drained: list[Changes] = []
        for tier in self.indexed:
            changed = self._undescribed[tier.medium]
            texts = tier.take_descriptions([key for key, there in changed.items() if there])
            drained += changes_of(tier.medium, changed, texts)
        self._undescribed.clear()
        return drained

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        """Keep descriptions of blocks beside those that disks have; see `CacheClient.describe`."""
        for tier in self.indexed:
            tier.describe(described)

    def sync(self) -> list[Future[str]]:
        """Have the disks keep all removals so far over a power failure; see `IndexedTier.sync`."""
        return [asked for tier in self.indexed for asked in tier.sync()]

    def renew(self) -> None:
        """End all fetches, and write no block that waits to be written: the arena was cleared. The
        tiers keep what they have, and the blocks of writes under way."""
        self.fetcher.clear()
        self.uses.clear()
        self._demotions.clear()
        for demoter in self._demoters:
            demoter.clear()

    def clear(self) -> None:
        """Clear all tiers and discard all reads and writes under way."""
        self.renew()
        for source in self._sources:
            source.tier.clear()
            source.clear()

    def empty(self) -> None:
        """Discard all reads and writes under way, and the blocks of tiers that no other process
        shares; see `LowerTier.empty`."""
        self.renew()
        for source in self._sources:
            source.tier.empty()
            source.clear()

    def drain(self) -> bool:
        """Have all tiers end what they do. A tier that has not done so when its calls count as hung
        is left out until it has, and may use `kept` until then. Does not wait. Returns whether all
        tiers have ended or are left out, and nothing is known of what they did; if not, the caller
        calls again."""
        now = time.monotonic()
        since = self._drains_since = self._drains_since or now
        hung = [source for source in self._sources if not source.tier.drain()]
        if any(not each.left_out and now - since <= each.stall_seconds for each in hung):
            return False
        for source, demoter in zip(self._sources, self._demoters, strict=True):
            if source not in hung:
                source.kept = None
            elif source.kept is None:
                source.kept = KeptBlocks(self.fetcher.reads.borrowed(source), demoter.borrowed)
                logger.error(
                    "FlexKV recovers from an error, and a call of the %s tier has not ended for "
                    "%g s; FlexKV goes on without this tier until the call ends; check the device "
                    "and the way to it",
                    source.medium.value,
                    now - since,
                )
        self._index.discard(self.kept[0])
        self._drains_since = None
        self.fetcher.forget()
        self.uses.clear()
        self._demotions.clear()
        self._writeback.forget()
        for demoter in self._demoters:
            demoter.forget()
        for source in self._sources:
            source.forget()
        return True

    @property
    def kept(self) -> tuple[list[Block], list[Block]]:
        """The blocks whose memory tiers that are left out may still write to, and those whose
        memory they may still read. Each tier has one lease of each of the latter."""
        kept = [each.kept for each in self._sources if each.kept is not None]
        return [b for each in kept for b in each.read], [b for each in kept for b in each.written]

    def close(self, flush_seconds: float) -> bool:
        """End all tiers at the same time, which may write waiting blocks for `flush_seconds`. Waits
        for them. Errors are logged, and no tier stays open because of another. False if a tier
        hangs or fails, and may still read or write memory of the arena."""
        for demoter in self._demoters:
            with _logged(demoter.source.medium):
                demoter.write_waiting(all_blocks=True)
        written = [tier.figures.written_blocks for tier in self.tiers]
        for tier in self.tiers:
            with _logged(tier.medium):
                tier.begin_close(flush_seconds)
        ended = [False] * len(self.tiers)
        for tier_rank, tier in enumerate(self.tiers):
            with _logged(tier.medium):
                ended[tier_rank] = tier.close(flush_seconds)
        for source, before in zip(self._sources, written, strict=True):
            # Writes during the close have no results.
            source.counters.demoted_blocks += source.tier.figures.written_blocks - before
        return all(ended)

    def _make_room(self, demoters: Sequence[Demoter]) -> bool:
        """If the arena has no free or evictable slot, cancel some writes that have not begun, those
        to the slowest tier first. Returns whether a slot may have become free.

        A block that waits to be written cannot be evicted. A fetch that a request waits for cancels
        writes to any tier: a block that is used now is worth more than one that may be used later.
        A store of the engine cancels only writes to shared stores, which may be slow or hang. It
        cancels no write to a disk, because one of two new blocks would be lost either way."""
        if self._index.has_room:
            return False
        return any(demoter.reclaim() for demoter in reversed(demoters))

    def _try_to_rejoin(self, source: Source, kept: KeptBlocks) -> None:
        """Use a tier again that was left out, if the call that hung has ended."""
        if not source.tier.drain():
            return
        self._index.abandon(kept.read)
        self._index.release_unused(kept.written)
        source.forget()
        source.kept = None
        logger.info("the %s tier works again", source.medium.value)

    def _promote(self, keys: Sequence[bytes], tier_rank: int) -> None:
        """Write blocks that the tier of `tier_rank` gave, or a faster one, to the tiers before
        it."""
        for demoter in self._on_store:
            if demoter.source.tier_rank < tier_rank:
                demoter.offer(keys)


def _as_open(circuits: Mapping[CircuitState, int]) -> Mapping[CircuitState, int]:
    return {CircuitState.OPEN: sum(circuits.values())}


@contextlib.contextmanager
def _logged(medium: Medium) -> Iterator[None]:
    """Log an error of a tier that is being closed. Without its calls, which hold buffers."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the other tiers would stay open
        logger.error("error in the %s tier while it closes: %r", medium.value, error)
