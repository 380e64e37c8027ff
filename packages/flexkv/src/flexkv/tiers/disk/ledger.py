# SPDX-License-Identifier: Apache-2.0
"""Counters of a disk store that outlive its process, and the daily write budget based on them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from flexkv.system.regular_files import open_regular
from flexkv.tiers.circuit import Circuit, CircuitState

FILE = "counters.json"
SCRATCH = f"{FILE}.new"
_HOUR = 3600
_DAY_HOURS = 24
_MAX_BYTES = 1 << 16
_MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,  # int() of a number that JSON reads as infinite
    RecursionError,  # brackets, thousands deep
)


@dataclass(slots=True)
class Ledger:
    """Counters of one folder, summed over all of its owners. If a process is killed, the counts of
    its last seconds are lost.

    One thread counts; another may call `dump` meanwhile.

    Attributes:
        hit_blocks: blocks that were read and intact.
        damaged_blocks: blocks that were read and did not match their checksum.
        written_blocks: blocks that were written.
        written_bytes: bytes written in each of the last 24 hours. The key counts hours since the
            epoch: the clock at the start of this process plus the time that has passed since. If
            the clock is set meanwhile, no entry becomes older or younger.
        circuits: the owner's circuits by name. They are saved for other processes to see; a new
            owner begins with its own.
        open_until: for each saved circuit that was not closed, the time by the clock until which
            it is open, in seconds since the epoch.
    """

    hit_blocks: int = 0
    damaged_blocks: int = 0
    written_blocks: int = 0
    written_bytes: dict[int, int] = field(default_factory=dict)
    circuits: Mapping[str, Circuit] = field(default_factory=dict, repr=False, compare=False)
    open_until: dict[str, float] = field(default_factory=dict, compare=False)
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
        return math.inf if day_bytes is None else max(0, day_bytes - self.day_bytes)

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
        content: dict[str, object] = {name: getattr(self, name) for name in _COUNTS}
        ahead = round((time.time() - time.monotonic() - self._zero) / _HOUR)
        oldest = self._hour() - _DAY_HOURS
        with self._lock:
            content["written_bytes"] = {
                hour + ahead: size for hour, size in self.written_bytes.items() if hour >= oldest
            }
        seconds = {name: circuit.opens_again for name, circuit in self.circuits.items()}
        content["open_until"] = {
            name: time.time() + each for name, each in seconds.items() if each is not None
        }
        return json.dumps(content).encode()

    def _hour(self) -> int:
        return int(self._zero + time.monotonic()) // _HOUR


_COUNTS = ("hit_blocks", "damaged_blocks", "written_blocks")


def load_ledger(folder: int) -> Ledger:
    """Read the ledger of the open directory `folder`. A missing, unreadable or damaged file gives
    an empty ledger."""
    try:
        fd = open_regular(folder, FILE, os.O_RDONLY)
        try:
            content = json.loads(os.pread(fd, _MAX_BYTES, 0))
        finally:
            os.close(fd)
        ledger = Ledger()
        for name in _COUNTS:
            setattr(ledger, name, int(content[name]))
        for name, until in content.get("open_until", {}).items():
            ledger.open_until[name] = float(until)
        now = int(time.time()) // _HOUR
        for hour, size in content["written_bytes"].items():
            # If the clock was put back, saved hours lie in the future. They would count until the
            # clock has passed them.
            known = min(int(hour), now)
            ledger.written_bytes[known] = ledger.written_bytes.get(known, 0) + max(0, int(size))
        return ledger
    except (OSError, *_MALFORMED):
        return Ledger()


def save_ledger(folder: int, content: bytes) -> None:
    """Replace the ledger of the open directory `folder` atomically.

    Args:
        folder: the open directory.
        content: the new content, from `Ledger.dump`.

    Raises:
        OSError: a system call failed. The old ledger stays.
    """
    fd = open_regular(folder, SCRATCH, os.O_WRONLY | os.O_CREAT)
    try:
        os.ftruncate(fd, 0)
        if os.write(fd, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), SCRATCH)
    finally:
        os.close(fd)
    try:
        os.replace(SCRATCH, FILE, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(SCRATCH, dir_fd=folder)
        raise
