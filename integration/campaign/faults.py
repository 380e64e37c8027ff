# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, how the campaign orders it, and what the engine's processes say of it.

Orders are in a file that every process of the engine looks at before it copies, reads or writes.
Each time that one is carried out, the process appends a line to a second file. Times are those of
`time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import enum
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

ORDERS = "orders.json"
HITS = "hits.jsonl"


class Kind(enum.StrEnum):
    """One way to fail."""

    LOAD_REFUSED = "the mover raises when it is to load"
    LOAD_FAILED = "a load fails after a while; its engine blocks hold wrong bytes"
    LOAD_LATE = "a load begins late"
    LOAD_WRONG = "a load brings wrong bytes and nobody says so"
    STORE_REFUSED = "the mover raises when it is to store"
    STORE_FAILED = "a store fails after a while; its slots hold wrong bytes"
    STORE_LATE = "a store begins late"
    READ_ERROR = "a read from disk fails with EIO"
    READ_DENIED = "a read from disk fails with EACCES"
    READ_SHORT = "a read gives a part only, and says so"
    READ_NOTHING = "a read gives nothing, as behind the end of a file"
    READ_FLIPPED = "a read gives bytes that are not those on the disk"
    WRITE_ERROR = "a write fails with EIO"
    WRITE_FULL = "a write fails with ENOSPC"
    WRITE_LOST = "nothing is written, and the call says that all is"
    WRITE_HALF = "a part is written, and the call says that all is"
    DISK_HANGS = "reads and writes do not return for a while"
    SLOTS_FLIPPED = "bytes of the slab files change under the engine"
    SLOTS_ZEROED = "parts of the slab files become zeros"
    TABLE_FLIPPED = "bytes of the table change"
    TABLE_ZEROED = "a part of the table becomes zeros"
    SLAB_TRUNCATED = "a slab file loses its end"
    DIRECTORY_GONE = "the cache directory vanishes for a while"
    DIRECTORY_LOCKED = "the directory and its files lose all permissions for a while"
    RESET = "everything cached is forgotten on demand"
    MASTER_HANGS = "Mooncake's master does not answer for a while"
    MASTER_KILLED = "Mooncake's master is killed, and comes back without what it knew"
    LENDER_HANGS = "the node whose memory holds Mooncake's blocks hangs for a while"
    LENDER_KILLED = "that node is killed, and another one lends memory"
    LENT_DAMAGED = "bytes of some objects of Mooncake change"
    BUCKET_HANGS = "the bucket's server does not answer for a while"
    BUCKET_KILLED = "the bucket's server is killed, and comes back empty"
    OBJECTS_DAMAGED = "bytes of some objects of the bucket change"


LOAD_FAILURES = frozenset({Kind.LOAD_REFUSED, Kind.LOAD_FAILED})
STORE_FAILURES = frozenset({Kind.STORE_REFUSED, Kind.STORE_FAILED})
REFUSALS = frozenset({Kind.LOAD_REFUSED, Kind.STORE_REFUSED})
READ_FAILURES = frozenset({Kind.READ_ERROR, Kind.READ_DENIED})
WRITE_FAILURES = frozenset({Kind.WRITE_ERROR, Kind.WRITE_FULL})
IN_FILES = frozenset(
    {
        Kind.SLOTS_FLIPPED,
        Kind.SLOTS_ZEROED,
        Kind.TABLE_FLIPPED,
        Kind.TABLE_ZEROED,
        Kind.SLAB_TRUNCATED,
        Kind.DIRECTORY_GONE,
        Kind.DIRECTORY_LOCKED,
    }
)
"""Done to the files by the campaign itself."""
IN_STORES = frozenset(
    {
        Kind.MASTER_HANGS,
        Kind.MASTER_KILLED,
        Kind.LENDER_HANGS,
        Kind.LENDER_KILLED,
        Kind.LENT_DAMAGED,
        Kind.BUCKET_HANGS,
        Kind.BUCKET_KILLED,
        Kind.OBJECTS_DAMAGED,
    }
)
"""Done to shared stores by the campaign itself."""
IN_ENGINE = frozenset(Kind) - IN_FILES - IN_STORES - {Kind.RESET}
"""Done by the plugin, inside the engine's processes."""
DRAWN = tuple(kind for kind in Kind if kind is not Kind.LOAD_WRONG and kind not in IN_STORES)
"""What a campaign without shared stores is made of: all that FlexKV must survive. Nothing can
survive the other one."""


@dataclass(frozen=True, slots=True)
class Order:
    """Let something go wrong, `count` times at most, and not after the time `until`."""

    number: int
    kind: Kind
    count: int
    until: float


@dataclass(frozen=True, slots=True)
class Hit:
    """Something went wrong, as ordered.

    Attributes:
        number: of the order.
        kind: as ordered.
        time: when.
        blocks: that it concerned: engine blocks of a copy, slots of a read or write; 0 for a
            read of a table.
    """

    number: int
    kind: Kind
    time: float
    blocks: int


class OrderBook:
    """The campaign's side: gives orders in `folder`, and reads what became of them.

    Attributes:
        given: orders so far, by kind.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._orders: list[Order] = []
        self._hits: list[Hit] = []
        self._read = 0
        self.given: Counter[Kind] = Counter()
        (folder / HITS).touch()
        self._write()

    def give(self, kind: Kind, count: int, seconds: float) -> Order:
        """Order `kind`, in force for so long."""
        order = Order(self.given.total() + 1, kind, count, time.monotonic() + seconds)
        self.given[kind] += 1
        self._orders = [each for each in self._orders if each.until > time.monotonic()]
        if kind in IN_ENGINE:
            self._orders.append(order)
            self._write()
        return order

    def withdraw(self) -> None:
        """No order is in force any more."""
        self._orders.clear()
        self._write()

    def hits(self) -> list[Hit]:
        """All that went wrong so far."""
        with (self._folder / HITS).open() as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith("\n"):
                    break  # is being written
                self._read += len(line)
                fields = json.loads(line)
                self._hits.append(Hit(**fields | {"kind": Kind[fields["kind"]]}))
        return list(self._hits)

    def _write(self) -> None:
        draft = self._folder / f".{ORDERS}"
        fields = [asdict(order) | {"kind": order.kind.name} for order in self._orders]
        draft.write_text(json.dumps(fields))
        draft.rename(self._folder / ORDERS)


class Steering:
    """The engine's side, in each of its processes. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ORDERS
        self._hits = os.open(folder / HITS, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._seen: tuple[int, int] | None = None
        self._orders: list[Order] = []
        self._done: Counter[int] = Counter()
        self._lock = threading.Lock()

    def draw(self, kinds: Collection[Kind], blocks: int) -> Kind | None:
        """What must go wrong now, if anything: noted as done."""
        with self._lock:
            now = time.monotonic()
            for order in self._current():
                wanted = order.kind in kinds and now < order.until
                if wanted and self._done[order.number] < order.count:
                    self._done[order.number] += 1
                    self._note(Hit(order.number, order.kind, now, blocks))
                    return order.kind
        return None

    def holds(self, kind: Kind) -> bool:
        """Whether an order of `kind` is in force, whatever has been done of it."""
        with self._lock:
            now = time.monotonic()
            return any(order.kind is kind and now < order.until for order in self._current())

    def _note(self, hit: Hit) -> None:
        line = json.dumps(asdict(hit) | {"kind": hit.kind.name}) + "\n"
        os.write(self._hits, line.encode())  # one call: lines of several processes do not mix

    def _current(self) -> list[Order]:
        found = os.stat(self._path)
        state = (found.st_ino, found.st_mtime_ns)
        if state != self._seen:
            self._seen = state
            fields = json.loads(self._path.read_text())
            self._orders = [Order(**each | {"kind": Kind[each["kind"]]}) for each in fields]
        return self._orders
