# SPDX-License-Identifier: Apache-2.0
"""Counters of a disk store that outlive its process, and the daily write budget based on them."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from flexkv.system.regular_files import closing_fd, open_regular
from flexkv.tiers.circuit import Circuit, CircuitState

FILE = "counters.json"
SCRATCH = f"{FILE}.new"
_HOUR = 3600
_DAY_HOURS = 24
_MAX_BYTES = 1 << 16
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Saved(msgspec.Struct):
    """The content of the file. Hours follow the clock at the time of the save."""

    hit_blocks: _Count
    damaged_blocks: _Count
    written_blocks: _Count
    written_bytes: dict[_Count, _Count]
    open_until: dict[str, float] = {}
    lost_hour: _Count | None = None


@dataclass(slots=True)
class Ledger:
    """Counters of one folder, summed over all of its owners. If a process is killed, the counts of
    its last seconds are lost.

    One thread counts; another may call `dump` meanwhile.

    Attributes:
        hit_blocks: blocks that were read and intact.
        written_bytes: bytes written in each of the last 24 hours. The key counts hours since the
            epoch: the clock at the start of this process plus the time that has passed since. If
            the clock is set meanwhile, no entry becomes older or younger.
        circuits: the owner's circuits by name. They are saved for other processes to see; a new
            owner begins with its own.
        lost_hour: the hour at which the file was found damaged. Writes until then are not in
            `written_bytes`, so a daily limit counts them as reaching it. None if all are there.
        problem: why the file gave no counts; empty if it did, or is missing.
        open_until: for each saved circuit that was not closed, the time by the clock until which
            it is open, in seconds since the epoch.
    """

    hit_blocks: int = 0
    damaged_blocks: int = 0
    written_blocks: int = 0
    written_bytes: dict[int, int] = field(default_factory=dict)
    circuits: Mapping[str, Circuit] = field(default_factory=dict, repr=False, compare=False)
    open_until: dict[str, float] = field(default_factory=dict, compare=False)
    lost_hour: int | None = None
    problem: str = field(default="", compare=False)
    _zero: float = field(init=False, repr=False, compare=False)
    _lock: threading.Lock = field(
        init=False, repr=False, compare=False, default_factory=threading.Lock
    )

    def __post_init__(self) -> None:
        self._zero = time.time() - time.monotonic()

    def left(self, day_bytes: int | None) -> float:
        """The bytes that may still be written within `day_bytes` in 24 hours.

        The oldest hour counts whole. No period of 24 hours therefore exceeds `day_bytes`. None
        means no limit.
        """
        if day_bytes is None:
            return math.inf
        return max(0, day_bytes - self.day_bytes) if self.day_is_known else 0

    @property
    def day_is_known(self) -> bool:
        """Whether `day_bytes` counts all writes of the last 24 hours."""
        return self.lost_hour is None or self.lost_hour < self._hour() - _DAY_HOURS

    @property
    def day_bytes(self) -> int:
        """Bytes that were written in the last 24 hours, or are about to be."""
        oldest = self._hour() - _DAY_HOURS
        return sum(size for hour, size in self.written_bytes.items() if hour >= oldest)

    def book_write(self, size: int) -> None:
        """Count bytes that are about to be written. If they are not written, the caller counts them
        back with a negative `size`."""
        hour = self._hour()
        with self._lock:
            if hour not in self.written_bytes:
                for old in [old for old in self.written_bytes if old < hour - _DAY_HOURS]:
                    del self.written_bytes[old]
            self.written_bytes[hour] = max(0, self.written_bytes.get(hour, 0) + size)

    def saved_state(self, name: str) -> CircuitState:
        """The state of an owner's circuit, derived from the saved time until which it is open."""
        until = self.open_until.get(name)
        if until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if time.time() < until else CircuitState.PROBING

    def dump(self) -> bytes:
        """The content of the file, as JSON. Its hours follow the clock as it is now."""
        ahead = round((time.time() - time.monotonic() - self._zero) / _HOUR)
        oldest = self._hour() - _DAY_HOURS
        with self._lock:
            written = {
                hour + ahead: size for hour, size in self.written_bytes.items() if hour >= oldest
            }
        seconds = {name: circuit.opens_again for name, circuit in self.circuits.items()}
        saved = _Saved(
            self.hit_blocks,
            self.damaged_blocks,
            self.written_blocks,
            written,
            {name: time.time() + each for name, each in seconds.items() if each is not None},
            None if self.lost_hour is None or self.day_is_known else self.lost_hour + ahead,
        )
        return msgspec.json.encode(saved)

    def _hour(self) -> int:
        return int(self._zero + time.monotonic()) // _HOUR


def load_ledger(folder: int) -> Ledger:
    """Read the ledger of the open directory `folder`. A missing file gives an empty ledger. An
    unreadable or damaged file gives one that names the problem, and knows no writes so far."""
    now = int(time.time()) // _HOUR
    try:
        with closing_fd(open_regular(folder, FILE, os.O_RDONLY)) as fd:
            saved = msgspec.json.decode(os.pread(fd, _MAX_BYTES, 0), type=_Saved)
    except FileNotFoundError:
        return Ledger()
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return Ledger(lost_hour=now, problem=f"{FILE} is damaged ({reason})")
    # If the clock was put back, saved hours lie in the future. They would count until the clock has
    # passed them.
    written: dict[int, int] = {}
    for hour, size in saved.written_bytes.items():
        written[min(hour, now)] = written.get(min(hour, now), 0) + size
    return Ledger(
        saved.hit_blocks,
        saved.damaged_blocks,
        saved.written_blocks,
        written,
        open_until=saved.open_until,
        lost_hour=None if saved.lost_hour is None else min(saved.lost_hour, now),
    )


def save_ledger(folder: int, content: bytes) -> None:
    """Replace the ledger of the open directory `folder` atomically, by what `Ledger.dump` gave.
    Raises OSError if a system call failed. The old ledger stays."""
    with closing_fd(open_regular(folder, SCRATCH, os.O_WRONLY | os.O_CREAT)) as fd:
        os.ftruncate(fd, 0)
        if os.write(fd, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), SCRATCH)
        os.fdatasync(fd)  # else a power failure may leave an empty file under the new name
    try:
        os.replace(SCRATCH, FILE, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(SCRATCH, dir_fd=folder)
        raise
