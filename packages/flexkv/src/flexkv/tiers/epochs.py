# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a shared store may be found: what all nodes agree on, in one record.

The record of a fingerprint has two parts, which are both part of each block's name. The epoch
changes when an engine is reset: keys mean something else in it, and may in processes that start
from now on. These are in the new epoch. The generation changes then as well, and when an operator
clears the store. A process takes its epoch from the record when it starts, and the generation
always. So after a reset, or a clear, the processes of an epoch go on together, and find nothing of
before. Which epoch the process is in that was reset itself: see `flexkv.tiers.remote`.

Only a process that starts makes a record where there is none. If a record is lost, processes that
have read it go on; the next one to start begins an epoch of its own.
Otherwise a node that was cut off during a reset could bring the generation of before back to life.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Protocol

FRESH_SECONDS = 1.0
"""How long a record that was read counts. A process that cannot read it any more finds nothing
after this time, whatever it knew."""

_RECORD = re.compile(rb"flexkv-epoch 1 ([0-9a-f]{32}) ([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Epoch:
    """What a record says; both are 32 hex digits."""

    name: str
    generation: str

    @classmethod
    def begin(cls) -> Epoch:
        """One that nobody has been in."""
        return cls(secrets.token_hex(16), secrets.token_hex(16))

    def to_bytes(self) -> bytes:
        return f"flexkv-epoch 1 {self.name} {self.generation}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Epoch:
        """Raises OSError if `data` is no record: then the store cannot be used."""
        match = _RECORD.fullmatch(data)
        if match is None:
            raise OSError("the record of the epoch is not one of FlexKV's")
        return cls(match[1].decode(), match[2].decode())


class EpochRecord(Protocol):
    """Where the record of one fingerprint is kept. All calls block, and raise OSError if the store
    does not do what is asked."""

    def read(self) -> bytes | None:
        """The record; None if there is none."""
        ...

    def create(self, record: bytes) -> None:
        """Write the record if there is none: of several that do so at once, one wins."""
        ...

    def replace(self, record: bytes) -> None:
        """Write the record, whether there is one or not."""
        ...


class Epochs:
    """The epoch of one process. Thread-safe.

    Args:
        record: of the fingerprint.
    """

    def __init__(self, record: EpochRecord) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._last = Epoch.begin()
        self._read_at = -FRESH_SECONDS
        self._failure: OSError | None = None
        self._failed_at = 0.0

    def open(self) -> str:
        """The store's epoch, begun if there is none. Called once, before any other call.

        Raises:
            OSError: the store cannot be reached.
        """
        data = self._record.read()
        if data is None:
            self._record.create(Epoch.begin().to_bytes())
            data = self._record.read()
        if data is None:
            raise OSError("the record of the epoch cannot be read back")
        self._last = Epoch.from_bytes(data)
        return self._last.name

    def folder(self, epoch: str) -> str:
        """Where blocks of an epoch lie now: part of their names.

        Raises:
            OSError: the store cannot be reached, so that nothing may be found in it.
        """
        came = time.monotonic()
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_SECONDS:
                self._refresh(came)
            return f"{epoch}-{self._last.generation}"

    def renew(self) -> None:
        """Begin an epoch for processes that start from now on, and a generation for all."""
        self._record.replace(Epoch.begin().to_bytes())

    def _refresh(self, came: float) -> None:
        """Read the record for a caller who came at some time."""
        if self._failure is not None and self._failed_at >= came:
            # Callers that waited for a read which failed do not wait for one each, in turn.
            raise OSError(str(self._failure))
        began = time.monotonic()
        try:
            data = self._record.read()
            if data is not None:
                self._last = Epoch.from_bytes(data)
        except OSError as error:
            self._failure, self._failed_at = error, time.monotonic()
            raise
        self._read_at, self._failure = began, None


def clear(record: EpochRecord) -> bool:
    """Begin a generation: nothing that was written before is found after this has returned.

    Returns whether there was a record. Waits until no process counts on the one of before.

    Raises:
        OSError: the store cannot be reached.
    """
    data = record.read()
    if data is None:
        return False
    record.replace(Epoch(Epoch.from_bytes(data).name, secrets.token_hex(16)).to_bytes())
    time.sleep(FRESH_SECONDS)
    return True
