# SPDX-License-Identifier: Apache-2.0
"""A store in memory that engines share: slow, failing or hanging as the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import xxhash

from flexkv.tiers.job import Outcome
from flexkv.tiers.questions import Found, Question

EPOCH = "shared"


class MemoryStore:
    """See `BlockStore`. Thread-safe.

    Attributes:
        blocks: by epoch and key, with their checksums.
        seconds: that each call takes, by its name.
        broken: names of calls that fail.
        hanging: names of calls that wait until `release`.
        waiting: names of the calls that wait now.
        finds: keys of each question, in order.
        calls: how many questions each call had.
        gets, puts: keys of each call, in order.
        opens: how often it was tried to open it.
        renewed: how often the epoch was renewed.
        registered: address and size, once registered.
        closed: whether it was closed.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, bytes], tuple[bytes, bytes]] = {}
        self.seconds = {"open": 0.0, "find": 0.0, "get": 0.0, "put": 0.0, "renew": 0.0}
        self.broken: set[str] = set()
        self.hanging: set[str] = set()
        self.waiting: list[str] = []
        self.finds: list[list[bytes]] = []
        self.calls: list[int] = []
        self.gets: list[list[bytes]] = []
        self.puts: list[list[bytes]] = []
        self.opens = 0
        self.renewed = 0
        self.registered: tuple[int, int] | None = None
        self.closed = False
        self._gate = threading.Event()
        self._lock = threading.Lock()

    def release(self) -> None:
        """Let what hangs go on."""
        self.hanging.clear()
        self._gate.set()

    def release_running(self) -> None:
        """Let the calls that hang now go on."""
        gate, self._gate = self._gate, threading.Event()
        gate.set()

    def fill(self, blocks: dict[bytes, bytes], epoch: str = EPOCH) -> None:
        """Have blocks that another engine wrote."""
        with self._lock:
            for key, data in blocks.items():
                self.blocks[epoch, key] = data, _checksum(epoch, key, data)

    def damage(self, key: bytes, epoch: str = EPOCH) -> None:
        data, checksum = self.blocks[epoch, key]
        self.blocks[epoch, key] = bytes([data[0] ^ 1]) + data[1:], checksum

    def keys(self, epoch: str = EPOCH) -> list[bytes]:
        with self._lock:
            return sorted(key for each, key in self.blocks if each == epoch)

    def register(self, address: int, size: int) -> None:
        self.registered = address, size

    def open(self) -> str:
        self.opens += 1
        self._pass("open")
        return EPOCH

    def find(
        self, epoch: str, questions: Sequence[Question], answer: Callable[[int, Found], None]
    ) -> None:
        self._pass("find")
        with self._lock:
            self.calls.append(len(questions))
            for number, question in enumerate(questions):
                wanted = [*question.keys, *question.scattered]
                self.finds.append(wanted)
                answer(number, [(epoch, key) in self.blocks for key in wanted])

    def get(
        self, epoch: str, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        self._pass("get")
        with self._lock:
            self.gets.append(list(keys))
            return [
                self._get(epoch, key, buffer) for key, buffer in zip(keys, buffers, strict=True)
            ]

    def put(
        self, epoch: str, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        self._pass("put")
        with self._lock:
            new = [key for key in keys if (epoch, key) not in self.blocks]
            self.puts.append(new)
        self.fill(
            {key: bytes(each) for key, each in zip(keys, buffers, strict=True) if key in new}, epoch
        )
        return [Outcome.DONE] * len(keys)

    def renew_epoch(self) -> None:
        self._pass("renew")
        with self._lock:
            self.blocks = {name: each for name, each in self.blocks.items() if name[0] != EPOCH}
        self.renewed += 1

    def close(self) -> None:
        self.closed = True

    def _get(self, epoch: str, key: bytes, buffer: memoryview) -> Outcome:
        found = self.blocks.get((epoch, key))
        if found is None:
            return Outcome.MISSING
        data, checksum = found
        buffer[:] = data
        if _checksum(epoch, key, data) == checksum:
            return Outcome.DONE
        del self.blocks[epoch, key]
        return Outcome.DAMAGED

    def _pass(self, name: str) -> None:
        time.sleep(self.seconds[name])
        if name in self.hanging:
            gate = self._gate
            self.waiting.append(name)
            gate.wait()
            self.waiting.remove(name)
        if name in self.broken:
            raise ConnectionError(name)


def _checksum(epoch: str, key: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data, xxhash.xxh3_64_intdigest(epoch.encode() + key))
