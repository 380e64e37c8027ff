# SPDX-License-Identifier: Apache-2.0
"""System calls of the disk tier that go wrong when ordered: the real ones, with faults before or
behind them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence

from flexkv.tiers.disk import OsFiles
from integration.campaign.faults import READ_FAILURES, WRITE_FAILURES, Kind, Steering

_READS = READ_FAILURES | {Kind.READ_SHORT, Kind.READ_NOTHING, Kind.READ_FLIPPED}
_WRITES = WRITE_FAILURES | {Kind.WRITE_LOST, Kind.WRITE_HALF}
_ERRORS = {
    Kind.READ_ERROR: errno.EIO,
    Kind.READ_DENIED: errno.EACCES,
    Kind.WRITE_ERROR: errno.EIO,
    Kind.WRITE_FULL: errno.ENOSPC,
}
_PAGE = 4096
_LOOK_SECONDS = 0.02


class SteeredFiles(OsFiles):
    """The real files, as `steering` lets them work."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        # A table is read where its directory is opened again: no block fails then.
        blocks = 0 if "/table" in os.readlink(f"/proc/self/fd/{fd}") else len(buffers)
        self._hang(blocks)
        fault = self._steering.draw(_READS, blocks)
        _raise_for(fault)
        if fault is Kind.READ_NOTHING:
            return 0
        if fault is Kind.READ_SHORT:
            return super().preadv(fd, _first_page(buffers), offset)
        count = super().preadv(fd, buffers, offset)
        if fault is Kind.READ_FLIPPED:
            buffers[0][0] ^= 0xFF
        return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._hang(len(buffers))
        fault = self._steering.draw(_WRITES, len(buffers))
        _raise_for(fault)
        if fault is Kind.WRITE_HALF:
            super().pwritev(fd, _first_page(buffers), offset)
        if fault in (Kind.WRITE_LOST, Kind.WRITE_HALF):
            return sum(map(len, buffers))
        return super().pwritev(fd, buffers, offset)

    def _hang(self, blocks: int) -> None:
        if self._steering.draw({Kind.DISK_HANGS}, blocks):
            while self._steering.holds(Kind.DISK_HANGS):
                time.sleep(_LOOK_SECONDS)


def _raise_for(fault: Kind | None) -> None:
    code = None if fault is None else _ERRORS.get(fault)
    if code is not None:
        raise OSError(code, os.strerror(code))


def _first_page(buffers: Sequence[memoryview]) -> list[memoryview]:
    """As a device may cut a transfer."""
    return [buffers[0][:_PAGE]]
