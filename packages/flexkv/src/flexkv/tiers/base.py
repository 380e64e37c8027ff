# SPDX-License-Identifier: Apache-2.0
"""The seam between the cache and the tiers below host memory: disks now, cluster stores later.

Bytes go between the caller's buffers and the tier, in batches of blocks; every block has its own
result. Nothing here waits: what was asked for is polled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexkv.changes import Change, Medium
from flexkv.tiers.job import Outcome, Priority


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
        blocks: complete ones, now.
        slots: blocks that it can hold.
        written_blocks: since the start.
        evicted_blocks: since the start.
        queued_blocks: to be read or written, those under way included, now.
        queued_bytes: that wait, now.
        open_reads: devices that are given no reads now, or are only tried; see `Circuit`.
        open_writes: the same of writes.
        openings: times that a circuit opened, since the start.
        traffic: since the start.
    """

    blocks: int
    slots: int
    written_blocks: int
    evicted_blocks: int
    queued_blocks: int
    queued_bytes: int
    open_reads: int
    open_writes: int
    openings: int
    traffic: Traffic


class LowerTier(Protocol):
    """Keeps blocks outside host memory. Called by one thread, and never waits.

    A buffer holds one block, as many bytes as a slot of the arena, and starts at a multiple of
    4 KiB. It is borrowed until its block's result was polled: not to be written meanwhile, and
    not to be read if the tier reads into it. After any outcome of a read but DONE its bytes are
    undefined.

    Attributes:
        medium: where it keeps them.
    """

    medium: Medium

    @property
    def figures(self) -> TierFigures:
        """What it holds and has done."""
        ...

    def name_of(self, key: bytes) -> bytes:
        """What changes call the block of `key`."""
        ...

    def watch(self) -> None:
        """From now on keep what `take_changes` tells; all that is there already is a change."""
        ...

    def take_changes(self, limit: int) -> list[Change]:
        """About `limit` blocks that came or went since `watch`, the latest first, each once.

        That a stalled tier cannot be read now is no change."""
        ...

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """For each key whether its block is complete in this tier, and can be read now: a tier
        that stalls has none."""
        ...

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], priority: Priority) -> int:
        """Begin to read blocks into `buffers`; returns the ticket of the batch."""
        ...

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        """Begin to write blocks of a prefix, in its order, from `buffers`; returns the ticket of
        the batch. Where there is no room for one, those behind it are DROPPED as well.

        A block whose key the tier has, or is writing, is DONE at once.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the blocks of a prefix as used, its first block as used last."""
        ...

    def delete(self, keys: Iterable[bytes]) -> None:
        """Forget blocks. They are not found from now on, nor after a restart."""
        ...

    def clear(self) -> None:
        """Forget all blocks, those being written too, and keep nothing that is written from now
        on beyond this process: what the keys stand for has changed (new weights), and the next
        process would take the old meaning for the new one."""
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

    def close(self, flush_seconds: float = 0.0) -> bool:
        """Begin the writes that wait for `flush_seconds`, or longer if the tier's own bound is
        longer, let running operations end, and drop the others; their results do not come any more.

        Returns whether all have ended. If not, a device hangs: then every buffer of an operation
        without a result stays borrowed until the process ends.
        """
        ...
