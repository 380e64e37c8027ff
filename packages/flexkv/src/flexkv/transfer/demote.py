# SPDX-License-Identifier: Apache-2.0
"""Writes of blocks from the arena to lower tiers.

A block is of use only after its parent. So a block is written only if the tier has its parent or is
writing the parent. Stores may end in another order than they began. So a block waits while its
parent is still being stored.

With admission on eviction, a block is written shortly before the arena evicts it. Blocks that a
client wants in lower tiers are written and leave as soon as nothing needs them any more: a request
that ends has blocks that are still being stored, written or loaded.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flexkv.index.block_index import Block, BlockIndex, BlockState
from flexkv.tiers.base import BlockResult
from flexkv.tiers.job import Outcome
from flexkv.transfer.sources import Source
from flexkv.types.backlog import share_of

_CHAIN_SHARE = 2
"""The predecessors of blocks that leave are written, too, up to half of the arena. The other half
holds the blocks that are stored and fetched meanwhile."""

_BLOCKS = 16
"""The least number of waiting blocks that one poll begins to write. To begin one takes about
0.01 ms with a disk."""

_WAITING_SHARE = 2
"""A poll begins more if more than half of the arena waits, because blocks that wait cannot be
evicted."""

_PAUSE_SECONDS = 1.0
"""After a tier has dropped a block, FlexKV offers it only newly stored blocks for this time. Else a
tier whose budget is spent would be offered blocks, and drop them, in every step."""

_PREFIXES = 64
"""The most prefixes at which one poll looks that clients want in lower tiers."""

HELD_SECONDS = 10.0
"""For so long a block that is in use may keep those before it from leaving. Not tuned."""

MOST_KEYS = 1 << 16
"""The most keys of such prefixes, about 7 MB; the prefixes whose turn it is are forgotten first."""

_LEAVING_SHARE = 8
"""With admission on eviction, an eighth of the arena is free or being written: 2 of 16 GiB, which
some long prompts fill before a disk has written as much. If stores need more, blocks are evicted
unwritten. Not tuned."""


class Demoter:
    """Writes blocks of the arena to one lower tier. Each block is leased from its offer until its
    write has ended, which `writeback` gets to know. Single-threaded.

    A prompt may have more blocks than one step of the engine has time for. So blocks that are
    offered wait, and each poll begins to write some of them.

    Attributes:
        reads: results of reads that `poll` has come upon; the caller takes them.
        writes: by the tier's ticket the blocks of each write whose result has not been taken. Only
            the demoter changes it.
    """

    def __init__(
        self,
        index: BlockIndex,
        slot_view: Callable[[int], memoryview],
        source: Source,
        writeback: EvictionWriteback,
    ) -> None:
        self.source = source
        self._index = index
        self._slot_view = slot_view
        self._writeback = writeback
        self._paused_until = 0.0
        self.forget()

    def forget(self) -> None:
        """Discard all blocks that wait or leave, and take no result of a write under way: the index
        ends all leases but those that the caller keeps."""
        self.reads: list[BlockResult] = []
        self.writes: dict[int, dict[int, Block]] = {}
        self._waiting: deque[Block] = deque()
        self._leaving: deque[Block] = deque()
        self._chain: list[Block] = []  # the first that leaves, then its predecessors, backwards
        self._unsure: list[Block] = []  # whether the tier has them is not known
        # By key, without the writes from before a reset. Another block may have the key since; the
        # write of the earlier block is then not in here.
        self._held: dict[bytes, Block] = {}  # in the chain, waiting, or being written
        self._writing: dict[bytes, Block] = {}

    @property
    def busy(self) -> bool:
        """Whether a block waits or leaves, or its write has no result yet."""
        return bool(self._waiting or self.writes or self._leaving)

    @property
    def waiting_blocks(self) -> int:
        """Number of blocks that wait for their writes to begin."""
        return len(self._held) - len(self._writing)

    @property
    def borrowed(self) -> list[Block]:
        """The blocks, each once, whose memory the tier may still read."""
        batches = (batch.values() for batch in self.writes.values())
        return list(dict.fromkeys(itertools.chain(*batches, self._unsure)))

    @property
    def paused(self) -> bool:
        """Whether the tier has dropped a block less than `_PAUSE_SECONDS` ago, or is left out."""
        return self.source.left_out or time.monotonic() < self._paused_until

    def lacks_any(self, keys: Sequence[bytes]) -> bool:
        """Whether the arena has one of these blocks and the tier, as far as known, has not."""
        there, has = self._index.present(keys), self.source.contains(keys)
        return True in [ready and not known for ready, known in zip(there, has, strict=True)]

    def holds(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks wait for their writes, or are being written."""
        return sum(key in self._held for key in keys)

    def offer(self, keys: Sequence[bytes]) -> None:
        """Queue the blocks of a prefix that are ready in the arena. `write_waiting` then writes the
        blocks that the tier lacks and whose parent the tier has or is writing."""
        if self.source.left_out:
            return
        # By few calls for all keys: the engine's step waits while a long prompt is offered.
        index, held, unique = self._index, self._held, set(keys)
        if len(unique) < len(keys) or not held.keys().isdisjoint(unique):
            keys = [key for key in dict.fromkeys(keys) if key not in held]
        blocks = index.lease(keys)
        if blocks is None:
            keys = list(itertools.compress(keys, index.present(keys)))
            blocks = index.lease(keys)
        if blocks is None:
            return  # `present` compares hashes of keys, `lease` keys
        held.update(zip(keys, blocks, strict=True))
        self._waiting.extend(blocks)

    def complete(self, keys: Sequence[bytes]) -> None:
        """`offer` a prefix that a request used, because the tier may have dropped or lost some of
        its blocks. Does nothing while the tier is `paused`."""
        if not self.paused:
            self.offer(keys)

    def write_leaving(self, victims: Iterable[Block]) -> None:
        """Queue blocks that are about to be evicted, which the caller has leased until it knows
        that their writes have ended. `write_waiting` writes each after those of its predecessors
        that the tier lacks."""
        self._leaving.extend(victims)

    def write_waiting(self, *, all_blocks: bool = False) -> None:
        """Begin to write some of the waiting blocks, or all of them. Called once each poll, after
        the tier's results, so that no child of a dropped block is written. Blocks that the tier has
        or whose parent it does not get are not written."""
        waiting = self._waiting
        if not (waiting or self._leaving or self._chain):
            return
        self._follow_leaving(all_blocks)
        beyond = len(waiting) - self._index.num_slots // _WAITING_SHARE
        most = len(waiting) if all_blocks else max(share_of(len(waiting), _BLOCKS), beyond)
        blocks = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        keys = [block.key for block in blocks]
        batch: dict[bytes, Block] = {}
        there: set[bytes] = set()
        unwritten: list[Block] = []
        for key, block, has in zip(keys, blocks, self.source.contains(keys), strict=True):
            before = block.parent_key
            if has:
                there.add(key)
            # Answers of a tier that needs queries are forgotten after a while.
            elif (
                before is None
                or before in batch
                or before in there
                or self._reaches(before, unknown=True)
            ):
                batch[key] = block
                continue
            elif self._parent_comes(block):
                waiting.append(block)
                continue
            else:
                self.source.counters.dropped_demotions += 1
            unwritten.append(block)
            del self._held[key]
        self._index.release_unused(unwritten)
        self._report(unwritten)
        if there and self.source.indexed is not None:
            # A request computed these again: writes must not evict them first.
            self.source.indexed.touch([key for key in keys if key in there])
        self._write(list(batch.values()))

    def drop_newest(self) -> list[Block]:
        """Drop the newest of the blocks that leave, about as many as a poll begins to write. If
        none leaves, drop the newest of the waiting blocks. Returns the dropped blocks."""
        newest = [self._leaving.pop() for _ in range(min(len(self._leaving), _BLOCKS))]
        if newest and not self._leaving:
            self._give_up_chain()
        elif not newest:
            newest = [self._waiting.pop() for _ in range(min(len(self._waiting), _BLOCKS))]
            self._release(newest)
        self._report(newest)
        self.source.counters.dropped_demotions += len(newest)
        return newest

    def clear(self) -> None:
        """Drop the blocks that wait or leave, because the arena and the tier are cleared. Writes
        under way continue, but the tier keeps no block of them."""
        held, leaving = [*self._waiting, *self._chain], [*self._leaving]
        for known in (self._waiting, self._chain, self._leaving, self._held, self._writing):
            known.clear()
        self._index.release_unused(held)
        self._report(held + leaving)

    def poll(self) -> bool:
        """Take the results of the tier. Returns whether a write has ended. Results of reads are
        kept, because the caller may be in the middle of a fetch."""
        ended = False
        for result in self.source.tier.poll():
            if result.ticket in self.writes:
                self.take(result)
                ended = True
            else:
                self.reads.append(result)
        return ended

    def reclaim(self) -> bool:
        """Cancel writes, the newest first, because a block is of use only after its predecessors.
        Stops after some. Returns whether any has ended by that."""
        if self.drop_newest():
            return True
        for ticket in reversed(list(self.writes)):
            self.source.tier.cancel(ticket)
            if self.poll():
                return True
        return False

    def take(self, result: BlockResult) -> None:
        """Count a result of a write, and end the write's lease."""
        batch = self.writes[result.ticket]
        block = batch.pop(result.position)
        if not batch:
            del self.writes[result.ticket]
        counters, outcome = self.source.counters, result.outcome
        counters.demoted_blocks += outcome is Outcome.DONE
        if self._writing.get(block.key) is block:  # else it was cleared, and so was the tier
            del self._writing[block.key], self._held[block.key]
            if outcome is Outcome.DONE:
                self.source.note([block.key], True)
        if outcome is Outcome.DROPPED:
            counters.dropped_demotions += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
        counters.failed_demotions += outcome is Outcome.FAILED
        self._index.release_unused([block])
        self._writeback.wrote(self, block)

    def _parent_comes(self, block: Block) -> bool:
        """Whether the parent of a block is still being stored or fetched, or waits to be
        written."""
        parent = block.parent
        return block.parent_key in self._held or (
            parent is not None and parent.state is BlockState.WRITING
        )

    def _reaches(self, key: bytes, unknown: bool = False) -> bool:
        """Whether the tier has the block of `key` or is writing it; `unknown` if the tier would
        need a query."""
        if key in self._writing:
            return True
        has = self.source.contains([key])[0]
        return unknown if has is None else has

    def _follow_leaving(self, all_blocks: bool) -> None:
        """Find some of the predecessors that must be written before a block that leaves, back to
        one that the tier has or gets. Queue these blocks in the order of their prefix."""
        chain, ended = self._chain, list[Block]()
        steps = share_of(len(self._leaving) + len(chain), _BLOCKS)
        while self._leaving and (steps > 0 or all_blocks):
            steps -= 1
            victim = self._leaving[0]
            block = (chain[-1].parent if chain else None) or victim
            if self._gets(block.key):
                # The end of a write names its block: another block's write would end unnoticed.
                if block is victim and self._held.get(victim.key) is not victim:
                    ended.append(victim)
            elif self._extend_chain(block, victim):
                if chain[-1].parent is not None:
                    continue
            else:
                self._give_up_chain()
                self.source.counters.dropped_demotions += 1
                ended.append(victim)
            chain.reverse()
            self._waiting.extend(chain)
            chain.clear()
            self._leaving.popleft()
        self._report(ended)

    def _extend_chain(self, block: Block, victim: Block) -> bool:
        """Lease `block`, the next of the chain of `victim`. False if the arena has lost it, or may
        hold no more blocks for those that leave."""
        if block is victim:
            # A load of it may have failed since. Then its key may be that of another block.
            may = victim.state is BlockState.READY
        else:
            may = len(self._held) < self._index.num_slots // _CHAIN_SHARE
        found = self._index.lease([block.key]) if may else None
        for each in found or ():
            self._chain.append(each)
            self._held[each.key] = each
        return found is not None

    def _give_up_chain(self) -> None:
        self._release(self._chain)
        self._chain.clear()

    def _release(self, blocks: Sequence[Block]) -> None:
        """End the leases of blocks that are not written."""
        for block in blocks:
            del self._held[block.key]
        self._index.release_unused(blocks)

    def _report(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._writeback.wrote(self, block)

    def _gets(self, key: bytes) -> bool:
        """Whether the tier has the block of `key`, is writing it, or will be given it."""
        return key in self._held or self._reaches(key)

    def _write(self, blocks: list[Block]) -> None:
        if not blocks:
            return
        views = [self._slot_view(block.slot) for block in blocks]
        self._unsure += blocks
        try:
            after = [each.parent_key for each in blocks]
            ticket = self.source.tier.write([block.key for block in blocks], views, after)
        except BaseException:
            # The tier may read the slots all the same, so their leases stay until it is drained. No
            # block waits for these.
            for block in blocks:
                del self._held[block.key]
            self.source.counters.failed_demotions += len(blocks)
            raise
        self.writes[ticket] = dict(enumerate(blocks))
        del self._unsure[-len(blocks) :]
        self._writing.update((block.key, block) for block in blocks)


class EvictionWriteback:
    """Writes blocks to lower tiers before the arena evicts them. It leases the blocks that would be
    evicted next, and evicts each block when every tier that is to get it has written it. The end of
    a prefix goes first, because a used block keeps all blocks that it builds on.
    Single-threaded."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self.forget()

    def make_room(self, demoters: Sequence[Demoter]) -> None:
        """Choose some of the blocks that would be evicted next, and let demoters write them. Once
        each poll."""
        writers = [demoter for demoter in demoters if not demoter.paused]
        if not writers:
            return
        goal = -(-self._index.num_slots // _LEAVING_SHARE)
        lacking = goal - self._index.free_slots - len(self._leaving)
        victims: list[Block] = []
        for _ in range(min(lacking, share_of(lacking, _BLOCKS))):
            victim = self._index.lease_victim()
            if victim is None:
                break
            victims.append(victim)
        self._write(victims, writers)

    def demote(self, victims: Sequence[Block], demoters: Sequence[Demoter]) -> None:
        """Let demoters write blocks of `BlockIndex.lease_to_leave`, in its order, and evict each
        block that then is in a tier. The others stay."""
        self._demoted.update((victim, demoters) for victim in victims)
        self._write(victims, demoters)

    def forget(self) -> None:
        """Discard all blocks that leave, because the index has ended all leases."""
        self._leaving: dict[Block, set[Demoter]] = {}
        self._demoted: dict[Block, Sequence[Demoter]] = {}
        self._behind: Counter[Block] = Counter()  # how many of these build on a block

    def wrote(self, demoter: Demoter, block: Block) -> None:
        """Note that `demoter` has written `block` or does not write it, and evict the block if no
        other demoter is to write it, and none is to write a block that builds on it."""
        writers = self._leaving.get(block)
        if writers is None:
            return
        writers.discard(demoter)
        last: Block | None = block
        while last is not None and self._leaving.get(last) == set() and last not in self._behind:
            del self._leaving[last]
            writers_of = self._demoted.pop(last, None)
            if writers_of is None or _is_in_one(writers_of, last.key):
                self._index.retire(last)
            else:
                self._index.keep(last)
            last = last.parent
            if last is not None:
                self._behind[last] -= 1
                if not self._behind[last]:
                    del self._behind[last]

    def _write(self, victims: Sequence[Block], demoters: Sequence[Demoter]) -> None:
        for victim in victims:
            self._leaving[victim] = set(demoters)
            if victim.parent is not None:
                self._behind[victim.parent] += 1
        for demoter in demoters:
            demoter.write_leaving(victims)


def _is_in_one(demoters: Sequence[Demoter], key: bytes) -> bool:
    """Whether the tier of one of the demoters has the block of `key`."""
    return any(demoter.source.contains([key])[0] for demoter in demoters)


@dataclass(slots=True)
class _PrefixDemotion:
    """Blocks of a prefix that have not begun to leave; the last goes first. The rest stays after
    `until`, time.monotonic() in seconds."""

    keys: list[bytes]
    until: float


class PrefixDemotions:
    """Demotes the blocks of prefixes, the end of a prefix first. A block stays if another block
    builds on it, or if it is pinned, retained or used meanwhile. `due` says whether `follow` may
    have something to do. Single-threaded."""

    def __init__(
        self, index: BlockIndex, demoters: Sequence[Demoter], writeback: EvictionWriteback
    ) -> None:
        self._index = index
        self._demoters = demoters
        self._writeback = writeback
        self.clear()

    def clear(self) -> None:
        """Discard all prefixes, because the arena was cleared."""
        self.due = False
        self._waiting: deque[_PrefixDemotion] = deque()
        self._count = 0
        self._unseen = 0  # prefixes at which no poll has looked since blocks were last given back

    def note(self, keys: Sequence[bytes]) -> None:
        """Demote the blocks of a prefix in later calls of `follow`."""
        self._waiting.append(_PrefixDemotion(list(keys), time.monotonic() + HELD_SECONDS))
        self._count += len(keys)
        while self._count > MOST_KEYS:
            self._count -= len(self._waiting.popleft().keys)
        self._unseen += 1
        self.due = True

    def retry(self) -> None:
        """Blocks that were in use may be so no longer."""
        self._unseen = len(self._waiting)
        self.due = bool(self._waiting)

    def follow(self) -> None:
        """Begin to demote some of the blocks. Once each poll."""
        if not self._waiting:
            return
        self.due = False
        now = time.monotonic()
        demoters = [demoter for demoter in self._demoters if not demoter.paused]
        most = share_of(self._count, _BLOCKS) if demoters else 0
        looked = min(len(self._waiting), _PREFIXES)
        for _ in range(looked):
            prefix = self._waiting.popleft()
            self._count -= len(prefix.keys)
            victims = self._take(prefix, most)
            most -= len(victims)
            if victims:
                self._writeback.demote(victims, demoters)
            if prefix.keys and now < prefix.until:
                self._waiting.append(prefix)
                self._count += len(prefix.keys)
        self._unseen = max(0, self._unseen - looked)
        self.due = bool(self._waiting and demoters) and (most <= 0 or self._unseen > 0)

    def _take(self, prefix: _PrefixDemotion, most: int) -> list[Block]:
        """Lease up to `most` of the blocks, up to one that may not leave now."""
        index, keys, victims = self._index, prefix.keys, list[Block]()
        while keys and len(victims) < most:
            victim = index.lease_to_leave(keys[-1])
            if victim is not None:
                victims.append(victim)
            elif keys[-1] in index:
                break
            keys.pop()
        return victims
