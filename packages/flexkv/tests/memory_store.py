# SPDX-License-Identifier: Apache-2.0
"""A store in memory that engines share: slow, failing or hanging as the test says."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from flexkv.tiers.envelope import fits, seal
from flexkv.tiers.epochs import Epoch
from flexkv.tiers.job import Outcome
from flexkv.tiers.questions import Found
from flexkv.tiers.remote import NamedQuestion, OpenStore, RemoteLimits

FINGERPRINT = "f" * 32


class MemoryStore:
    """A `BlockStore` and its `EpochRecord`. Thread-safe.

    Attributes:
        blocks: envelopes and bytes, by name.
        seconds: that each call takes, by its name.
        broken: names of calls that fail.
        hanging: names of calls that wait until `release`.
        waiting: names of the calls that wait now.
        finds: keys of each question, in order.
        calls: how many questions each call had.
        gets, puts: keys of each call, in order.
        opens: how often it was tried to open it.
        renewed: how often the record of the epoch was replaced.
        registered: address and size, once registered.
        closed: whether it was closed.
    """

    prefix = "memory"

    def __init__(self) -> None:
        self.blocks: dict[str, tuple[bytes, bytes]] = {}
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
        self._epoch = Epoch.first()
        self._gate = threading.Event()
        self._lock = threading.Lock()

    def opened(self, limits: RemoteLimits, name: str) -> OpenStore:
        """What a tier over this store takes."""
        return OpenStore(self, self, limits, name)

    def release(self) -> None:
        """Let what hangs go on."""
        self.hanging.clear()
        self._gate.set()

    def release_running(self) -> None:
        """Let the calls that hang now go on."""
        gate, self._gate = self._gate, threading.Event()
        gate.set()

    def fill(self, blocks: dict[bytes, bytes]) -> None:
        """Have blocks that another engine wrote."""
        with self._lock:
            for key, data in blocks.items():
                self._put(self._name(key), data)

    def damage(self, key: bytes) -> None:
        envelope, data = self.blocks[self._name(key)]
        self.blocks[self._name(key)] = envelope, bytes([data[0] ^ 1]) + data[1:]

    def keys(self) -> list[bytes]:
        """The keys of the blocks that an engine finds which starts now."""
        with self._lock:
            return sorted(_key(name) for name in self.blocks if name == self._name(_key(name)))

    def register(self, address: int, size: int) -> None:
        self.registered = address, size

    def open(self) -> None:
        self.opens += 1
        self._pass("open")

    def read(self) -> bytes:
        return self._epoch.to_bytes()

    def create(self, record: bytes) -> None:
        """Does nothing: there is a record."""

    def replace(self, record: bytes) -> None:
        self._pass("renew")
        self._epoch = Epoch.from_bytes(record)
        self.renewed += 1

    def find(
        self, questions: Sequence[NamedQuestion], answer: Callable[[int, Found], None]
    ) -> None:
        self._pass("find")
        with self._lock:
            self.calls.append(len(questions))
            for number, question in enumerate(questions):
                wanted = [name for names in question for name in names]
                self.finds.append([_key(name) for name in wanted])
                answer(number, [name in self.blocks for name in wanted])

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Outcome]:
        self._pass("get")
        with self._lock:
            self.gets.append([_key(name) for name in names])
            return [self._get(name, buffer) for name, buffer in zip(names, buffers, strict=True)]

    def put(self, names: Sequence[str], buffers: Sequence[memoryview]) -> Sequence[Outcome]:
        self._pass("put")
        with self._lock:
            new = [name not in self.blocks for name in names]
            self.puts.append([_key(name) for name in itertools.compress(names, new)])
            for name, buffer in itertools.compress(zip(names, buffers, strict=True), new):
                self._put(name, bytes(buffer))
        return [Outcome.DONE] * len(names)

    def close(self) -> None:
        self.closed = True

    def _name(self, key: bytes) -> str:
        """The name of a block in the present epoch."""
        folder = f"{self._epoch.name}-{self._epoch.generation}"
        return f"{self.prefix}/{FINGERPRINT}/{folder}/{key.hex()}"

    def _put(self, name: str, data: bytes) -> None:
        self.blocks[name] = seal(name.encode(), memoryview(data)), data

    def _get(self, name: str, buffer: memoryview) -> Outcome:
        found = self.blocks.get(name)
        if found is None:
            return Outcome.MISSING
        envelope, data = found
        buffer[:] = data
        if fits(envelope, name.encode(), buffer):
            return Outcome.DONE
        del self.blocks[name]
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


def _key(name: str) -> bytes:
    return bytes.fromhex(name.rpartition("/")[2])
