# SPDX-License-Identifier: Apache-2.0
"""System calls that go wrong on demand: the real ones, with faults before or behind them."""

from __future__ import annotations

import enum
import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Sequence

from flexkv.tiers.disk import OsFiles


class Fault(enum.Enum):
    """What goes wrong in one call."""

    EIO = "the call fails with EIO"
    ENOSPC = "the call fails with ENOSPC"
    SHORT = "only a part is transferred, and the call says so"
    NOTHING = "nothing is transferred, and the call says so"
    LOST = "nothing is written, and the call says that all is"
    HALF = "a part is written, and the call says that all is"
    MISPLACED = "the bytes are written one page further, and the call says nothing of it"
    FLIPPED = "a bit that was read is not what is on the disk"


READ_FAULTS = (Fault.EIO, Fault.SHORT, Fault.NOTHING, Fault.FLIPPED)
WRITE_FAULTS = (
    Fault.EIO,
    Fault.ENOSPC,
    Fault.SHORT,
    Fault.NOTHING,
    Fault.LOST,
    Fault.HALF,
    Fault.MISPLACED,
)


class FaultyFiles(OsFiles):
    """The real files, of which each call goes wrong with a given probability.

    Attributes:
        rate: probability of a fault for each call; may be changed at any time.
        kinds: faults to choose from.
        counts: faults so far.
        in_runs: those of them in calls for several blocks.
    """

    def __init__(self, seed: int = 0, rate: float = 0.0, *kinds: Fault) -> None:
        self.rate = rate
        self.kinds = kinds or tuple(Fault)
        self.counts: Counter[Fault] = Counter()
        self.in_runs = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fault = self._draw(READ_FAULTS, len(buffers))
        if fault is Fault.EIO:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault is Fault.SHORT:
            return super().preadv(fd, _half(buffers), offset)
        if fault is Fault.NOTHING:
            return 0
        count = super().preadv(fd, buffers, offset)
        if fault is Fault.FLIPPED and count:
            with self._lock:
                bit = self._random.randrange(8 * count)
            _flip(buffers, bit)
        return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fault = self._draw(WRITE_FAULTS, len(buffers))
        size = sum(map(len, buffers))
        if fault in (Fault.EIO, Fault.ENOSPC):
            code = errno.EIO if fault is Fault.EIO else errno.ENOSPC
            raise OSError(code, os.strerror(code))
        if fault is Fault.NOTHING:
            return 0
        if fault is Fault.LOST:
            return size
        if fault in (Fault.SHORT, Fault.HALF):
            count = super().pwritev(fd, _half(buffers), offset)
            return count if fault is Fault.SHORT else size
        if fault is Fault.MISPLACED and offset + 4096 + size <= os.fstat(fd).st_size:
            offset += 4096
        return super().pwritev(fd, buffers, offset)

    def _draw(self, possible: Sequence[Fault], blocks: int) -> Fault | None:
        with self._lock:
            kinds = [fault for fault in possible if fault in self.kinds]
            if not kinds or self._random.random() >= self.rate:
                return None
            fault = self._random.choice(kinds)
            self.counts[fault] += 1
            self.in_runs += blocks > 1
            return fault


class HangingFiles(OsFiles):
    """The real files; reads below one directory do not return until `release`, or the end of the
    `with` that this stands in: so nothing waits for a test that fails.

    Attributes:
        hanging: set once a read hangs.
    """

    def __init__(self) -> None:
        self.hanging = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self._root = ""

    def hang(self, root: object) -> None:
        """From now on reads below `root` hang."""
        self._root = str(root)
        self._free.clear()

    def hang_no_more(self) -> None:
        """Later reads do not hang; those that hang go on hanging."""
        self._root = "/nowhere"

    def release(self) -> None:
        """All reads go on."""
        self._free.set()

    def __enter__(self) -> HangingFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self._free.is_set() and os.readlink(f"/proc/self/fd/{fd}").startswith(self._root):
            self.hanging.set()
            self._free.wait()
        return super().preadv(fd, buffers, offset)


class NoDirectFiles(OsFiles):
    """Files of a file system that has no O_DIRECT."""

    def open(self, folder: int, name: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        return super().open(folder, name, flags)


def _half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The first half of their bytes, of whole pages where there are several: as a device cuts
    it."""
    half = sum(map(len, buffers)) // 2
    half = half - half % 4096 or half
    first = []
    for buffer in buffers:
        first.append(buffer[:half])
        half -= len(first[-1])
    return [buffer for buffer in first if len(buffer)]


def _flip(buffers: Sequence[memoryview], bit: int) -> None:
    """One bit of their bytes."""
    for buffer in buffers:
        if bit < 8 * len(buffer):
            buffer[bit // 8] ^= 1 << bit % 8
            return
        bit -= 8 * len(buffer)
