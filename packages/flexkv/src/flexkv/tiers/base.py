# SPDX-License-Identifier: Apache-2.0
"""The seam between the cache and the tiers below host memory: disks, and stores that others share.

A tier copies blocks between the caller's buffers and itself, in batches. Every block has its own
result. No call waits: the caller submits work and polls for its results.

There are two kinds of tiers. An `IndexedTier`, such as a disk, knows which blocks it has. A
`QueriedTier` must query a store, for instance one on a network that other nodes fill. A fetch from
a `QueriedTier` begins with a query. A block without an answer by the tier's deadline is a miss.
`flexkv.tiers.remote` makes a `QueriedTier` of a store whose calls block. Most new tiers need only
such a store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from flexkv.eviction import NO_GUARD, GuardState, RequestContext
from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.job import Outcome, Priority, Urgency
from flexkv.types.admission import ADMISSIONS, Admission
from flexkv.types.changes import Medium

MAX_KEY_BYTES = 96
"""The longest key of a block. A record of 128 bytes on disk has room for so much. Keys of
engines have up to 49 bytes: a hash, the number of a group, the stamp of an adapter."""


class BlockResult(NamedTuple):
    """The result of one block of a batch. A tuple, because an engine's step takes many."""

    ticket: int
    position: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question about keys.

    Attributes:
        has: for each key whether the tier has its block, first for `keys` and then for `scattered`;
            None if the question failed, or could not be asked by its deadline.
        late: whether there was no answer at the deadline, or the tier had no room for the question.
    """

    ticket: int
    has: Sequence[bool] | None
    late: bool = False


@dataclass(slots=True)
class Traffic:
    """Bytes that were read and written since the start, and the seconds that the reads and writes
    took. The times of reads that run at once add up, and so do those of writes."""

    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    written_seconds: float = 0.0

    def add(self, size: int, seconds: float, writes: bool) -> None:
        """Count a read or write of `size` bytes."""
        if writes:
            self.written_bytes += size
            self.written_seconds += seconds
        else:
            self.read_bytes += size
            self.read_seconds += seconds


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What a tier holds now, and has done since the start.

    Attributes:
        blocks: complete blocks now; 0 if the tier does not know.
        slots: how many blocks the tier can hold; 0 if the tier does not know.
        queued_blocks: blocks that wait to be read or written, or are being so.
        queued_bytes: bytes of the reads and writes that wait.
        reads: how many devices have a circuit of reads in each state; states of none are absent.
            That of a device whose link is stalled counts as open.
        writes: the same for the circuits of writes.
        openings: how often circuits have opened.
        policy: name of the eviction policy; empty if the tier evicts by none of ours.
        expired_blocks: blocks that have left because they were too old, at the start or since.
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
    policy: str = ""
    guard: GuardState = NO_GUARD
    expired_blocks: int = 0


class States(Protocol):
    """Reports the states of a tier's circuits to other processes."""

    def begin(self, read: Callable[[], Mapping[str, str]]) -> None:
        """Report the states that `read` returns, by name, until `close`. Another thread calls
        `read`."""
        ...

    def close(self) -> None: ...


class LowerTier(Protocol):
    """Keeps blocks outside host memory. One thread calls it; only `close` waits.

    A buffer holds one block, has the length of an arena slot, and starts at a multiple of 4 KiB.
    The tier borrows the buffer until the caller has polled the block's result. Until then, the
    caller must not write the buffer. If the tier reads a block into it, the caller must not read it
    either. If a read ends as DONE, the buffer holds the bytes that were written under that key. The
    tier has verified the checksum that travels with the block. After any other outcome, the bytes
    are undefined.

    A read or write that hangs keeps its buffer. The cache then fetches the block from the next
    tier, into another slot. `medium`: the tier's name in metrics, hit sources and events; each tier
    of a cache has its own.
    """

    medium: Medium

    @property
    def figures(self) -> TierFigures: ...

    def read(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        priority: Priority,
        turn: int = 0,
    ) -> int:
        """Begin to read the blocks of `keys` into `buffers`; `turn` as in `Job`. Returns the ticket
        of the batch."""
        ...

    def write(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        after: Sequence[bytes | None] | None = None,
    ) -> int:
        """Begin to write blocks of a prefix, in its order, from `buffers`. Returns the ticket of
        the batch. If the tier has no room for a block, it drops that block and those behind it.

        `after` has for each block the key of the block that it builds on, None for the first of a
        prefix; it is None if that is unknown. A tier that chooses its victims by a policy keeps a
        block as long as blocks that build on it.

        If the tier has a block, the block's result is DONE, and the tier does not write it again. A
        tier that must query its store does so before it sends bytes. If the tier is writing the
        block, it begins no second write. A disk then returns DONE at once; a shared store returns
        the result of the write under way.
        """
        ...

    def clear(self) -> None:
        """Discard all blocks, including those that are being written. Other processes do not find
        blocks written from now on, because keys mean something else in this process (new weights).
        The next process may use the old meaning.

        A shared store keeps its blocks. Its keys contain an epoch of the fingerprint, and this
        process continues in an epoch of its own; see `flexkv.tiers.remote`.
        """
        ...

    def empty(self) -> None:
        """Discard all blocks that other processes do not share, including those that are being
        written. Unless `clear` was called before, later processes find blocks written from now on.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """Drop the blocks of a batch whose reads or writes have not begun. `poll` returns their
        results, too."""
        ...

    def raise_priority(self, ticket: int, urgency: Urgency) -> None:
        """Raise the reads or writes of a batch that have not begun to `urgency`."""
        ...

    def hung(self, ticket: int) -> Collection[int]:
        """Positions of the blocks of a batch whose read or write hangs now. Reads and writes of
        other blocks may still end."""
        ...

    def poll(self) -> list[BlockResult]:
        """The results since the last call. Each block of each batch has exactly one result."""
        ...

    def drain(self) -> bool:
        """Drop all reads, writes and questions that have not begun, and all results. Called after
        an error that may have lost the caller's records of them. Does not wait. Returns whether no
        read, write or question runs. If so, the tier borrows no buffer, and `poll` returns no
        result of earlier calls. If not, the caller calls again."""
        ...

    def begin_close(self, flush_seconds: float) -> None:
        """Drop the reads that wait, and begin waiting writes for at most `flush_seconds` more, or
        for the tier's own bound if that is longer. Does not wait. Idempotent. A cache calls it for
        all its tiers before it closes one, so that they end at the same time."""
        ...

    def close(self, flush_seconds: float = 0.0) -> bool:
        """Call `begin_close`, wait for the running reads and writes, and drop the others. `poll`
        returns no more results. Returns whether all reads and writes have ended. If not, a device
        hangs: every buffer without a result stays borrowed until the process ends."""
        ...


class IndexedTier(LowerTier, Protocol):
    """A tier that knows its blocks."""

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """For each key whether the tier has its complete block and can read it now. A stalled tier,
        or one whose circuit is open, can read none."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the blocks of a prefix as used, the first block last, so that the prefix is evicted
        from its end."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the blocks of `keys` that are complete; no later process finds them."""
        ...

    def sync(self) -> list[Future[str]]:
        """Have the devices keep all removals and resets so far over a power failure. Each result
        says what a later process may find nevertheless; it is empty if it finds nothing. A device
        that hangs gives none."""
        ...

    def remove_old(self) -> None:
        """Remove some of the blocks that are too old. Called once in a second, if blocks have a
        greatest age."""
        ...

    def began(self, keys: Sequence[bytes], context: RequestContext, now: float) -> None:
        """A request was scheduled; see `EvictionPolicy.began`. `keys` are all blocks of its prompt,
        those that no tier has included."""
        ...

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        """See `EvictionPolicy.ended`."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether the next `poll` lets the tier have more blocks, such as those of a drive that was
        not open at the start."""
        ...

    def watch(self) -> None:
        """Record changes for `drain_changes` from now on. All blocks that the tier has count as
        changes."""
        ...

    @property
    def has_changes(self) -> bool:
        """Whether `drain_changes` may return any."""
        ...

    def drain_changes(self, limit: int) -> dict[bytes, bool]:
        """About `limit` blocks that the tier got or lost since the last call, the oldest change
        first; for the key of each whether the tier got it. A stall is not a change. Empty without
        `watch`."""
        ...

    def listed(self) -> Iterator[list[bytes]]:
        """Keys of the blocks that the tier has or is writing, a part at a time; they come and leave
        between two parts."""
        ...

    def describe(self, described: Mapping[bytes, bytes]) -> None:
        """Keep descriptions by key, in the caller's own format, beside the blocks, over restarts.
        Best effort, written later; blocks that are not there are skipped."""
        ...

    def take_descriptions(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The descriptions that an earlier process has left of blocks which `drain_changes` has
        just returned, each once. Blocks without a description are missing."""
        ...


@runtime_checkable
class QueriedTier(LowerTier, Protocol):
    """A tier that needs a query to know which blocks it has. The cache remembers for a while what
    the tier has answered, read and written. It queries a key again only after the answer, or after
    `clear`. The tier emits no events, because a store does not report what it evicts.
    `question_seconds`: the deadline of a question. A block without an answer by then is a miss for
    the fetch that waits; later requests use the answer."""

    question_seconds: float

    @property
    def readable(self) -> bool:
        """Whether the tier can be queried and read now. A stalled tier cannot, nor can one whose
        circuit is open."""
        ...

    def register(self, address: int, size: int) -> None:
        """Name the memory of all later buffers, for RDMA. The cache calls this once, before any
        other method. The memory stays mapped until `close` has returned True."""
        ...

    def query(self, keys: Sequence[bytes], scattered: Sequence[bytes] = ()) -> int:
        """Query which of these blocks the tier has. Does not wait. Returns the question's ticket.

        Args:
            keys: keys of a prefix, in order; a block is of use only behind those before it.
            scattered: keys of further blocks. Each is of use on its own if `keys` is empty, or if
                the tier has the first block of `keys`.
        """
        ...

    def drain_answers(self) -> list[Answer]:
        """The answers since the last call. Each question has exactly one. It may come after the
        deadline, but a question that the tier could not put by then has failed."""
        ...


AnyTier: TypeAlias = IndexedTier | QueriedTier


@dataclass(frozen=True, slots=True)
class AttachedTier:
    """A tier, which the cache owns, and how the cache uses it. `stall_seconds`: if a fetch gets no
    block from the tier for this time, it takes the block from the next tier, or ends."""

    tier: AnyTier
    admission: Admission = ADMISSIONS["write_through"]
    stall_seconds: float = 1.0
