# SPDX-License-Identifier: Apache-2.0
"""The seam between the cache and the tiers below host memory: disks, and stores that others share.

Bytes go between the caller's buffers and the tier, in batches of blocks; every block has its own
result. Nothing here waits: work is submitted, and its results are polled.

There are two kinds of tiers. An `IndexedTier` knows at once which blocks it has, as a disk does. An
`AskedTier` has to ask, for instance a store on a network that other nodes fill: a fetch then begins
with a question, and what is not answered by the tier's deadline is a miss. `flexkv.tiers.remote`
makes an `AskedTier` of a store whose calls block; most new tiers need only such a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from flexkv.admission import ADMISSIONS, Admission
from flexkv.changes import Change, Medium
from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.job import Outcome, Priority

MAX_KEY_BYTES = 96
"""The longest key of a block. A record of 128 bytes on disk has room for so much. Keys of vLLM and
SGLang have up to 49 bytes: a hash, the number of a group, the stamp of an adapter."""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The result of one block of a batch.

    Attributes:
        ticket: of the batch, as `read` or `write` returned it.
        position: of the block in the batch.
        outcome: how it ended.
    """

    ticket: int
    position: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tier found out about the keys of one question.

    Attributes:
        ticket: of the question, as `ask` returned it.
        has: for each key whether the tier has its block; None if that could not be found out.
    """

    ticket: int
    has: Sequence[bool] | None


@dataclass(slots=True)
class Traffic:
    """Blocks that were read or written, since the start. Bytes, and the seconds that each read or
    write took; those that run at once all count."""

    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    written_seconds: float = 0.0

    def add(self, size: int, seconds: float, writes: bool) -> None:
        """Count blocks of `size` bytes."""
        if writes:
            self.written_bytes += size
            self.written_seconds += seconds
        else:
            self.read_bytes += size
            self.read_seconds += seconds


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What a tier holds and has done.

    Attributes:
        blocks: complete ones, now; 0 if the tier does not know.
        slots: blocks that it can hold; 0 if the tier does not know.
        written_blocks: since the start.
        evicted_blocks: since the start.
        queued_blocks: to be read or written, those under way included, now.
        queued_bytes: that wait, now.
        reads: devices by the state that the circuit of their reads is in now; none of a state that
            is not there.
        writes: the same of writes.
        openings: times that a circuit opened, since the start.
        traffic: since the start.
    """

    blocks: int
    slots: int
    written_blocks: int
    evicted_blocks: int
    queued_blocks: int
    queued_bytes: int
    reads: Mapping[CircuitState, int]
    writes: Mapping[CircuitState, int]
    openings: int
    traffic: Traffic


class LowerTier(Protocol):
    """Keeps blocks outside host memory. Called by one thread, and never waits but in `close`.

    A buffer holds one block, as many bytes as a slot of the arena, and starts at a multiple of
    4 KiB. It is borrowed until its block's result was polled: not to be written meanwhile, and
    not to be read if the tier reads into it. After any outcome of a read but DONE its bytes are
    undefined. DONE means that the bytes of a read are those that were written under that key, which
    the tier has verified itself: a checksum travels with each block.

    A read or write that hangs keeps its buffer for as long, and nothing else: the cache fetches the
    block from the next tier, into another slot.

    Attributes:
        medium: the tier's name in metrics, hit sources and events; no two tiers of a cache share
            one.
    """

    medium: Medium

    @property
    def figures(self) -> TierFigures:
        """What it holds and has done."""
        ...

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], priority: Priority) -> int:
        """Begin to read blocks into `buffers`; returns the ticket of the batch."""
        ...

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Begin to write blocks of a prefix, in its order, from `buffers`; returns the ticket of
        the batch. Where there is no room for one, those behind it are DROPPED as well.

        A block whose key the tier has is DONE and not written again; a tier that has to ask finds
        that out before it sends bytes. One that the tier is writing is not written again either:
        its result is DONE on a disk, and that of the write under way in a shared store.
        """
        ...

    def clear(self) -> None:
        """Forget all blocks, those being written too, and keep nothing that is written from now
        on beyond this process: what the keys stand for has changed (new weights), and the next
        process would take the old meaning for the new one.

        A store that others share cannot be wiped. Its keys lie in a namespace, an epoch of the
        fingerprint, and this process leaves for one of its own; see `flexkv.tiers.remote`.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """Do not begin what has not begun of a batch. Its results still come."""
        ...

    def hasten(self, ticket: int, priority: Priority) -> None:
        """Raise what has not begun of a batch to `priority`."""
        ...

    def poll(self) -> list[BlockResult]:
        """Results that came since the last call. Each block of each batch has exactly one."""
        ...

    def begin_close(self, flush_seconds: float) -> None:
        """Begin no more but the writes that wait, and these for `flush_seconds`, or longer if the
        tier's own bound is longer. Idempotent; several tiers of a cache end at the same time."""
        ...

    def close(self, flush_seconds: float = 0.0) -> bool:
        """`begin_close`, let running operations end, and drop the others; their results do not come
        any more.

        Returns whether all have ended. If not, a device hangs: then every buffer of an operation
        without a result stays borrowed until the process ends.
        """
        ...


class IndexedTier(LowerTier, Protocol):
    """A tier that knows its blocks."""

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """For each key whether its block is complete in this tier, and can be read now: a tier
        that stalls, or whose circuit is open, has none."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the blocks of a prefix as used, its first block as used last."""
        ...

    def watch(self) -> None:
        """From now on keep what `take_changes` tells; all that is there already is a change."""
        ...

    def take_changes(self, limit: int) -> list[Change]:
        """About `limit` blocks that came or went since `watch`, the latest first, each once.

        That a stalled tier cannot be read now is no change."""
        ...


@runtime_checkable
class AskedTier(LowerTier, Protocol):
    """A tier that has to ask which blocks it has. The cache remembers the answers for a while, the
    blocks that it wrote or read among them, and asks about a key again only after an answer, or
    after `clear`. The tier emits no events: a store does not tell what it evicts.

    Attributes:
        question_seconds: the deadline of a question. What is not answered by then is a miss for
            whoever waits; the answer still counts for later requests.
    """

    question_seconds: float

    @property
    def readable(self) -> bool:
        """Whether questions and reads are worth a try now: not while the tier stalls, nor while
        its circuit is open."""
        ...

    def register(self, address: int, size: int) -> None:
        """All buffers of later calls lie in `size` bytes from `address` on, which stay mapped until
        `close` returned True. Called once, before any other call; for RDMA."""
        ...

    def ask(self, keys: Sequence[bytes]) -> int:
        """Begin to find out which blocks the tier has, in one question; returns its ticket."""
        ...

    def take_answers(self) -> list[Answer]:
        """Answers that came since the last call. Each question has exactly one, however late."""
        ...


AnyTier: TypeAlias = IndexedTier | AskedTier


@dataclass(frozen=True, slots=True)
class AttachedTier:
    """A tier and how a cache uses it.

    Attributes:
        tier: owned by the cache.
        admission: which blocks are written to it.
        stall_seconds: a fetch that gets no block from it for as long takes what it waits for from
            the next tier, or ends.
    """

    tier: AnyTier
    admission: Admission = ADMISSIONS["write_through"]
    stall_seconds: float = 1.0
