# SPDX-License-Identifier: Apache-2.0
"""FlexKV's connector over a disk that reads no faster than `SLOW_DISK_MBPS` megabytes per second,
and writes no faster than `SLOW_DISK_WRITE_MBPS`, and not while the file `SLOW_DISK_HELD` exists:
for `kv_connector_module_path`, which has vLLM import this in all of its processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from flexkv.tiers.disk.files import OsFiles
from flexkv_vllm.connector import FlexKVConnectorV1

__all__ = ["FlexKVConnectorV1"]


class _Drive:
    """Makes calls end when a device of `speed` bytes per second would have ended them, which does
    one after the other."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._speed
            done = self._free_at
        time.sleep(max(0.0, done - time.monotonic()))


_reader = _Drive(float(os.environ["SLOW_DISK_MBPS"]) * 1e6)
_writer = _Drive(float(os.environ["SLOW_DISK_WRITE_MBPS"]) * 1e6)
_held = Path(os.environ["SLOW_DISK_HELD"]) if "SLOW_DISK_HELD" in os.environ else None
_LOOK_SECONDS = 0.01
_read, _write = OsFiles.preadv, OsFiles.pwritev


def _read_slowly(self: OsFiles, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    size = _read(self, fd, buffers, offset)
    _reader.wait(size)
    return size


def _write_slowly(self: OsFiles, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    while _held is not None and _held.exists():
        time.sleep(_LOOK_SECONDS)
    size = _write(self, fd, buffers, offset)
    _writer.wait(size)
    return size


OsFiles.preadv = _read_slowly  # type: ignore[method-assign]
OsFiles.pwritev = _write_slowly  # type: ignore[method-assign]
