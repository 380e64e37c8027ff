# SPDX-License-Identifier: Apache-2.0
"""The stores of one engine, from the order until the service has their blocks, and the slots that
the service has granted for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from flexkv.index.block_index import IndexReader
from flexkv.service import messages as wire
from flexkv.service.line import Line

_PART = wire.MOST_KEYS // 2
"""Blocks that one message publishes: each may bring the key of the block before it."""

_MOST_LATE = 64
"""Demotions that wait for stores; beyond it the oldest is forgotten."""


def _returns(slots: Sequence[int]) -> list[wire.Return]:
    return [wire.Return(part) for part in wire.parts(slots)]


def _without_repetitions(keys: Sequence[bytes], places: Sequence[int]) -> list[int]:
    """The places without those of keys that came before."""
    first: dict[bytes, int] = {}
    for place in places:
        first.setdefault(keys[place], place)
    return list(first.values())


@dataclass(slots=True, eq=False)
class PlannedStore:
    """A store.

    Attributes:
        before: for each block the key of the one before it; empty if that is the one before it in
            `keys`, None for the first of a prefix.
        builds_on: the stores that have blocks before these.
        refused: how many further blocks have no place.
        tenants: for each block the number of its tenant; empty for the engine's own.
        dropped: positions of blocks that must not be published.
        is_announced, is_told: whether the service knows of its keys, and of its end.
        is_void: whether its blocks may be stored anew.
    """

    keys: list[bytes] = field(default_factory=list)
    before: list[bytes | None] = field(default_factory=list)
    builds_on: set[int] = field(default_factory=set)
    refused: int = 0
    slots: list[int] = field(default_factory=list)
    tenants: list[int] = field(default_factory=list)
    cell: int = -1
    dropped: set[int] = field(default_factory=set)
    has_ended: bool = False
    is_announced: bool = False
    is_told: bool = False
    is_void: bool = False

    def runs(self) -> list[bytes]:
        """The keys of blocks that follow each other, as those of prompts do."""
        follows = [before == b"" for before in self.before]
        follows_next = zip(follows, [*follows[1:], False], strict=False)
        return [key for key, near in zip(self.keys, follows_next, strict=True) if any(near)]

    def parts(self) -> list[wire.Publish]:
        """The messages that publish its blocks."""
        if not self.dropped and len(self.keys) <= _PART:
            return [wire.Publish(self.cell, self.keys, self.before, self.slots, self.tenants, True)]
        places = self._kept() if self.dropped else range(len(self.keys))
        made = []
        for start in range(0, len(places), _PART):
            part = places[start : start + _PART]
            before = [self.before[place] for place in part]
            if start and before[0] == b"":
                before[0] = self.keys[part[0] - 1]
            made.append(
                wire.Publish(
                    self.cell,
                    [self.keys[place] for place in part],
                    before,
                    [self.slots[place] for place in part],
                    [self.tenants[place] for place in part if self.tenants],
                    start + _PART >= len(places),
                )
            )
        return made

    def _kept(self) -> list[int]:
        """The positions of the blocks to publish: without a dropped block, none is found that
        builds on it."""
        for place in range(1, len(self.keys)):
            if self.before[place] == b"" and place - 1 in self.dropped:
                self.dropped.add(place)
        return [place for place in range(len(self.keys)) if place not in self.dropped]


class ServedStores:
    """Single-threaded. `free_cell` frees the cell of a store that has ended; idempotent.

    Attributes:
        granted: all slots that the service has granted and not got back.
        free: those of them that no store has.
        by_id: the stores, in the order of their ids.
        keys: keys of their blocks, but for those that are not published in any case.
    """

    def __init__(self, reader: IndexReader, line: Line, free_cell: Callable[[int], None]) -> None:
        self._reader = reader
        self._line = line
        self._free_cell = free_cell
        self.granted: set[int] = set()
        self.free: list[int] = []
        self.by_id: dict[int, PlannedStore] = {}
        self.keys: set[bytes] = set()
        self._told: deque[int] = deque()
        self._published = 0
        self._late: deque[tuple[set[int], Sequence[bytes]]] = deque(maxlen=_MOST_LATE)

    @property
    def untold(self) -> int:
        """The number of stores of which the service has not been told."""
        return len(self.by_id) - len(self._told)

    @property
    def has_published(self) -> bool:
        """Whether the service has published stores that have not been drained."""
        return bool(self._told) and self._line.published != self._published

    @property
    def awaits_answer(self) -> bool:
        """Whether the service has been told of stores that it has not published."""
        return bool(self._told)

    def grant(self, slots: Sequence[int]) -> None:
        """The service grants slots."""
        # None is free twice: the engine handles a message again after an error.
        self.free += [slot for slot in slots if slot not in self.granted]
        self.granted.update(slots)

    def recall(self, count: int) -> None:
        """The service wants as many slots back, if there are so many."""
        self.give_back([self.free.pop() for _ in range(min(count, len(self.free)))])

    def give_back(self, slots: Sequence[int]) -> None:
        """The service may grant these slots to others. If it is gone, they stay granted."""
        if slots:
            returns, granted = _returns(slots), self.granted
            # In one statement, as in `publish`.
            (granted.difference_update if self._line.put(*returns) else self.free.extend)(slots)

    def plan(
        self,
        keys: Sequence[bytes],
        positions: Sequence[int],
        prefix_starts: Collection[int],
        tenants: Sequence[int] | None = None,
    ) -> PlannedStore:
        """A store of the blocks at `positions` that have no slot and can be found by a prefix, as
        far as there are slots, which it has taken. `begin` or `undo` follows."""
        absent, starts = set(self._reader.missing(keys)), set(prefix_starts)
        new = [place for place in positions if place in absent and keys[place] not in self.keys]
        made = PlannedStore()
        known = {keys[place] for place in new}
        if len(known) < len(new):
            new = _without_repetitions(keys, new)

        def alone() -> list[int]:
            """Those whose predecessors are neither in the index nor in this store."""
            return [
                place
                for place in new
                if place not in starts and place - 1 in absent and keys[place - 1] not in known
            ]

        if len(new) < len(absent):  # else each predecessor that is absent is new
            before = (self._store_of(keys[place - 1]) for place in alone())
            made.builds_on = {store for store in before if store is not None}
            while lost := [place for place in alone() if keys[place - 1] not in self.keys]:
                made.refused += len(lost)
                known.difference_update(keys[place] for place in lost)
                new = [place for place in new if keys[place] in known]
        made.refused += max(0, len(new) - len(self.free))
        del new[len(self.free) :]
        made.keys = [keys[place] for place in new]
        if tenants is not None:
            made.tenants = [tenants[place] for place in new]
        made.before = [
            None if place in starts else b"" if place - 1 == last else keys[place - 1]
            for place, last in zip(new, [-2, *new], strict=False)
        ]
        left = len(self.free) - len(new)
        made.slots = self.free[left:]
        del self.free[left:]
        return made

    def _store_of(self, key: bytes) -> int | None:
        """The store under way that has a block on which later ones may build."""
        if key not in self.keys:
            return None
        stores = ((number, store) for number, store in self.by_id.items() if not store.is_void)
        return next((number for number, store in stores if key in store.keys), None)

    def begin(self, number: int, cell: int, store: PlannedStore) -> bool:
        """A planned store is under way. Returns whether to tell the service of it at once, because
        other engines may wait for its blocks."""
        store.cell = cell
        self.by_id[number] = store
        self.keys.update(store.keys)
        announced = store.runs()
        for part in wire.parts(announced):
            self._line.put(wire.Announce(cell, part))
        store.is_announced = bool(announced)
        return store.is_announced

    def undo(self, store: PlannedStore) -> None:
        """A planned store could not begin, or has failed."""
        self._retract(store)
        self.announce_nothing()
        self.free += store.slots

    def announce_nothing(self) -> None:
        """Some blocks of prompts are not stored. It is not known which requests compute them."""
        self._line.put(wire.Retract(None))

    def _retract(self, store: PlannedStore) -> None:
        if store.is_announced:
            self._line.put(wire.Retract(store.cell))
            store.is_announced = False

    def end(self, number: int) -> PlannedStore:
        """A store is over: its cell is free, and nobody knows of it any more. Its slots are the
        caller's."""
        store = self.by_id[number]
        if not store.is_void:
            self.keys.difference_update(store.keys)
        self._free_cell(store.cell)
        del self.by_id[number]
        return store

    def publish(self) -> None:
        """Tell the service of the stores that have ended, each after those that it builds on. Those
        of which no block is published, or of which it cannot be told, are over."""
        for number, store in list(self.by_id.items()):
            if not store.has_ended or store.is_told:  # told ones: see `lose_told`
                continue
            before = (self.by_id.get(each) for each in store.builds_on)
            if any(each is not None and not each.is_told for each in before):
                continue
            parts = store.parts()
            returns = _returns([store.slots[place] for place in store.dropped])
            # In one statement: no error can come between the messages and the note of them.
            store.is_told = bool(parts) and self._line.put(*parts, *returns)
            if store.is_told:
                self._told.append(number)
            else:
                self._retract(store)
                self.end(number)
                self.give_back(store.slots)
        self._send_demotions()

    def demote(self, keys: Sequence[bytes]) -> None:
        """See `CacheClient.demote`. The service learns of the demotion after the stores that it
        does not know of yet: they may have blocks of the prefix."""
        self._late.append(({number for number in self.by_id if self._is_untold(number)}, keys))
        self._send_demotions()

    def forget_demotions(self) -> None:
        """The keys mean nothing any more."""
        self._late.clear()

    def _is_untold(self, number: int) -> bool:
        store = self.by_id.get(number)
        return store is not None and not store.is_told

    def _send_demotions(self) -> None:
        while self._late and not any(map(self._is_untold, self._late[0][0])):
            _, keys = self._late.popleft()
            # The last part first: the end of the prefix leaves before its beginning.
            for part in reversed([*wire.parts(keys)]):
                self._line.put(wire.Demote(part))

    def drain_published(self) -> int | None:
        """End the stores that the service has published since the last call: their slots are the
        index's. Returns the number of their blocks; None if there is no such store."""
        count = (self._line.published - self._published) % (1 << 32)
        # More than were told: the next service has set the number to zero.
        if not count or count > len(self._told):
            return None
        blocks = 0
        for _ in range(count):
            store = self.by_id.get(self._told[0])  # None after an error below
            if store is not None:
                # First: after an error, slots that are granted and of no store count as free.
                self.granted.difference_update(store.slots)
                self.end(self._told[0])
                blocks += len(store.keys) - len(store.dropped)
            # In one statement: else later counts would be of other stores.
            _, self._published = self._told.popleft(), (self._published + 1) % (1 << 32)
        return blocks

    def claim(self) -> None:
        """Tell a service that did not grant them which slots this engine has."""
        self._published = 0
        *first, last = list(wire.parts(sorted(self.granted))) or [[]]
        for part in first:
            self._line.put(wire.Claim(part, False))
        self._line.put(wire.Claim(last, True))

    def lose_told(self) -> None:
        """The service is gone. Its index has the blocks of the stores that it was told of, or its
        successor frees their slots. These stores have ended."""
        for number, store in list(self.by_id.items()):
            if store.is_told:
                self.granted.difference_update(store.slots)
                self.end(number)
        self._late.clear()
        self._told.clear()
        # One that was published and granted again is not claimed.
        self.free = [slot for slot in self.free if slot in self.granted]

    def discard_all(self) -> None:
        """Publish none of the stores under way. Their blocks may be stored anew."""
        for store in self.by_id.values():
            store.is_void = True
            if not store.is_told:
                store.dropped.update(range(len(store.keys)))
        self.keys.clear()
        self.announce_nothing()

    def recover(self, under_way: Collection[int]) -> None:
        """After an error that may have lost some: the stores are those under way, and those that
        have ended; all other slots are free."""
        for number, store in list(self.by_id.items()):
            if number not in under_way and not store.has_ended:
                self.end(number)
        alive = [store for store in self.by_id.values() if not store.is_void]
        self.keys = {key for store in alive for key in store.keys}
        told = [number for number, store in self.by_id.items() if store.is_told]
        self._told.extend(set(told).difference(self._told))  # one at most, the latest
        used = {slot for store in self.by_id.values() for slot in store.slots}
        self.free = sorted(self.granted - used)
