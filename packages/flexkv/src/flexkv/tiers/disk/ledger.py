# SPDX-License-Identifier: Apache-2.0
"""What a disk store counts over all its processes, and the write budget that rests on it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from dataclasses import asdict, dataclass, field

FILE = "counters.json"
_HOUR = 3600
_DAY_HOURS = 24
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
    """Counters of one folder. Survive the process, up to the last seconds before a kill.

    Attributes:
        hit_blocks: read back, verified.
        damaged_blocks: found not to be what was written.
        failed_reads: that the system refused.
        written_blocks: by all owners so far.
        failed_writes: that the system refused.
        written_bytes: by hour since the epoch, of the last 24 hours.
    """

    hit_blocks: int = 0
    damaged_blocks: int = 0
    failed_reads: int = 0
    written_blocks: int = 0
    failed_writes: int = 0
    written_bytes: dict[int, int] = field(default_factory=dict)

    def may_write(self, size: int, day_bytes: int | None) -> bool:
        """Whether `size` bytes more keep the last 24 hours within `day_bytes` (None: no limit).

        Hours are counted whole, so that at no time more than `day_bytes` were written in the 24
        hours before.
        """
        if day_bytes is None:
            return True
        self._forget_old()
        return sum(self.written_bytes.values()) + size <= day_bytes

    def book_write(self, size: int) -> None:
        """Count bytes that are about to be written; less than 0 if they were not, after all."""
        hour = int(time.time()) // _HOUR
        self.written_bytes[hour] = max(0, self.written_bytes.get(hour, 0) + size)

    def dump(self) -> bytes:
        """As a file holds it."""
        self._forget_old()
        return json.dumps(asdict(self)).encode()

    def _forget_old(self) -> None:
        oldest = int(time.time()) // _HOUR - _DAY_HOURS
        for hour in [hour for hour in self.written_bytes if hour < oldest]:
            del self.written_bytes[hour]


def load_ledger(folder: str) -> Ledger:
    """The ledger of `folder`; an empty one if it has none that can be read."""
    try:
        with open(os.path.join(folder, FILE), "rb") as file:
            content = json.loads(file.read(1 << 16))
        counts = {
            name: int(content[name])
            for name in Ledger.__dataclass_fields__
            if name != "written_bytes"
        }
        ledger = Ledger(**counts, written_bytes={})
        now = int(time.time()) // _HOUR
        for hour, size in content["written_bytes"].items():
            # An hour to come is of a clock that was put back: else it would count for ever.
            known = min(int(hour), now)
            ledger.written_bytes[known] = ledger.written_bytes.get(known, 0) + max(0, int(size))
        return ledger
    except (OSError, *_MALFORMED):
        return Ledger()


def save_ledger(folder: str, content: bytes) -> None:
    """Replace the ledger of `folder`, whole or not at all.

    Raises:
        OSError: as the system says.
    """
    path = os.path.join(folder, FILE)
    scratch = f"{path}.new"
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), scratch)
    finally:
        os.close(fd)
    try:
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
