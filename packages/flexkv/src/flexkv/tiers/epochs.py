# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a shared store may be found. All nodes read it from one record.

The record of a fingerprint has two parts, epoch and generation. Both are part of each block's name.

- The epoch changes when an engine is reset. Keys then mean something else in that engine, and may
  do so in processes that start later. These processes use the new epoch.
- The generation changes at a reset, and when an operator clears the store.

A process reads the epoch once, when it first reaches the store after its start, and the generation
again and again. So after a reset or a clear, the processes of an epoch go on sharing, and find no
older block. `flexkv.tiers.remote` says which epoch the process uses that was reset itself.

A process that finds no record writes one, always with a new generation: at its start with the
first epoch, later with the epoch that it last read in the record. So after a record is lost, no
block from before the loss is found again, and a node that was cut off during a reset restores
nothing. Without a reset before the loss, all processes go on sharing. After one, processes that
start share with those of the epoch that the writer knew.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""Seconds for which a record is used after it was read. A process that cannot read the record finds
no block after this time."""

_FIRST = "0" * 31 + "1"
_RECORD = re.compile(rb"flexkv-epoch 1 ([0-9a-f]{32}) ([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Epoch:
    """The content of a record: the epoch and the generation, of 32 hexadecimal digits each."""

    name: str
    generation: str

    @classmethod
    def first(cls) -> Epoch:
        """The epoch of a store without resets, which all processes name alike, in a new
        generation."""
        return cls(_FIRST, secrets.token_hex(16))

    @classmethod
    def begin(cls) -> Epoch:
        """A new epoch and generation, at random."""
        return cls(secrets.token_hex(16), secrets.token_hex(16))

    def next_generation(self) -> Epoch:
        """The same epoch in a new generation, at random."""
        return Epoch(self.name, secrets.token_hex(16))

    def to_bytes(self) -> bytes:
        return f"flexkv-epoch 1 {self.name} {self.generation}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Epoch:
        """Read a record. Raises OSError if `data` is none; then the store cannot be used."""
        match = _RECORD.fullmatch(data)
        if match is None:
            raise OSError("the record of the epoch is not one of FlexKV's")
        return cls(match[1].decode(), match[2].decode())


class EpochRecord(Protocol):
    """The record of one fingerprint in a store. All calls block, and raise OSError if the store
    fails."""

    def read(self) -> bytes | None:
        """The record; None if there is none."""

    def create(self, record: bytes) -> None:
        """Write the record if there is none. If several processes do so at once, one succeeds."""

    def replace(self, record: bytes) -> None:
        """Write the record, in place of one that is there."""


class Epochs:
    """The epoch of one process. Thread-safe."""

    def __init__(self, record: EpochRecord) -> None:
        self._record = record
        self._lock = threading.Lock()
        self._last = Epoch.begin()
        self._read_at = -FRESH_SECONDS
        self._failure: str | None = None  # a text: an error would keep its callers' buffers
        self._failed_at = 0.0

    def open(self) -> str:
        """Read the store's epoch, and begin one if there is none. Called until it succeeds, and
        before any other method but `renew`. Raises OSError if the store cannot be reached."""
        data = self._record.read()
        if data is None:
            data = self._create(Epoch.first())
        self._last = Epoch.from_bytes(data)
        return self._last.name

    def folder(self, epoch: str) -> str:
        """The folder that holds the blocks of an epoch now, a part of their names. Raises OSError
        if the store cannot be reached; no block of it may be used then."""
        came = time.monotonic()
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_SECONDS:
                self._refresh(came)
            return f"{epoch}-{self._last.generation}"

    def renew(self) -> None:
        """Begin a new epoch for processes that start later, and a new generation for all."""
        begun = Epoch.begin()
        self._record.replace(begun.to_bytes())
        with self._lock:  # a read that is under way may have the record of before
            self._last = begun  # restored if the record is lost before it is read again

    def _refresh(self, came: float) -> None:
        """Read the record for a caller that came at time.monotonic() `came`, in seconds."""
        if self._failure is not None and self._failed_at >= came:
            # This caller waited for the read that failed; it does not wait for one of its own.
            raise OSError(self._failure)
        began = time.monotonic()
        try:
            data = self._record.read()
            if data is None:
                data = self._create(self._last.next_generation())
                logger.warning(
                    "the record of the epoch in a shared store was lost; FlexKV has written a new "
                    "one and goes on sharing; no engine finds blocks written before the loss"
                )
            self._last = Epoch.from_bytes(data)
        except OSError as error:
            self._failure, self._failed_at = str(error), time.monotonic()
            raise
        self._read_at, self._failure = began, None

    def _create(self, new: Epoch) -> bytes:
        """Create the missing record with `new`, and read the one that is there then."""
        self._record.create(new.to_bytes())
        data = self._record.read()
        if data is None:
            raise OSError("the record of the epoch cannot be read back")
        return data


def clear(record: EpochRecord) -> bool:
    """Begin a new generation. After the return, no process finds a block written before the call.
    Waits until no process uses the old record. Returns whether there was a record. Raises OSError
    if the store cannot be reached."""
    data = record.read()
    if data is None:
        return False
    record.replace(Epoch.from_bytes(data).next_generation().to_bytes())
    time.sleep(FRESH_SECONDS)
    return True
