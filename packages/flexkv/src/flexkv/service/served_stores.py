# SPDX-License-Identifier: Apache-2.0
"""The stores of one engine, from the order until the service has their blocks, and the slots that
the service has granted for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from flexkv.index.block_index import IndexReader
from flexkv.service import messages as wire
from flexkv.service.line import Line

_PART = wire.MOST_KEYS // 2
"""Blocks that one message publishes: each may bring the key of the block before it."""


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
        keys: keys of its blocks.
        before: for each block the key of the one before it; empty if that is the one before it in
            `keys`, None for the first of a prefix.
        builds_on: the stores that have blocks before these.
        refused: how many further blocks have no place.
        slots: for each block its granted slot.
        cell: its cell of the board.
        dropped: positions of blocks that must not be published.
        has_ended: whether all ranks have copied it.
        is_told: whether the service knows.
    """

    keys: list[bytes] = field(default_factory=list)
    before: list[bytes | None] = field(default_factory=list)
    builds_on: set[int] = field(default_factory=set)
    refused: int = 0
    slots: list[int] = field(default_factory=list)
    cell: int = -1
    dropped: set[int] = field(default_factory=set)
    has_ended: bool = False
    is_told: bool = False

    def parts(self, number: int) -> list[wire.Publish]:
        """The messages that publish its blocks, as the store of this number."""
        places = self._kept() if self.dropped else range(len(self.keys))
        made = []
        for start in range(0, len(places), _PART):
            part = places[start : start + _PART]
            before = [self.before[place] for place in part]
            if start and before[0] == b"":
                before[0] = self.keys[part[0] - 1]
            made.append(
                wire.Publish(
                    number,
                    self.cell,
                    [self.keys[place] for place in part],
                    before,
                    [self.slots[place] for place in part],
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
    """Single-threaded.

    Args:
        reader: of the pool's index; borrowed.
        line: to the service; borrowed.

    Attributes:
        granted: all slots that the service has granted and not got back.
        free: those of them that no store has.
        by_id: the stores, in the order of their ids.
        by_key: for the key of each of their blocks the store.
    """

    def __init__(self, reader: IndexReader, line: Line) -> None:
        self._reader = reader
        self._line = line
        self.granted: set[int] = set()
        self.free: list[int] = []
        self.by_id: dict[int, PlannedStore] = {}
        self.by_key: dict[bytes, int] = {}

    def grant(self, slots: Sequence[int]) -> None:
        """The service grants slots."""
        self.granted.update(slots)
        self.free += slots

    def recall(self, count: int) -> None:
        """The service wants as many slots back, if there are so many."""
        self.give_back([self.free.pop() for _ in range(min(count, len(self.free)))])

    def give_back(self, slots: Sequence[int]) -> None:
        """The service may grant these slots to others. If it is gone, they stay granted."""
        if self._line.is_cut:
            self.free += slots
            return
        self.granted.difference_update(slots)
        for start in range(0, len(slots), wire.MOST_KEYS):
            self._line.put(wire.Return(list(slots[start : start + wire.MOST_KEYS])))

    def plan(
        self, keys: Sequence[bytes], positions: Sequence[int], prefix_starts: Collection[int]
    ) -> PlannedStore:
        """A store of the blocks at `positions` that have no slot and can be found by a prefix, as
        far as there are slots, which it has taken. `begin` or `undo` follows."""
        absent, starts = set(self._reader.missing(keys)), set(prefix_starts)
        new = [place for place in positions if place in absent and keys[place] not in self.by_key]
        made = PlannedStore()
        known = {keys[place] for place in new}
        if len(known) < len(new):
            new = _without_repetitions(keys, new)

        def alone() -> list[int]:
            """Those whose predecessors are neither in the index nor in this store: mostly none."""
            return [
                place
                for place in new
                if place not in starts and place - 1 in absent and keys[place - 1] not in known
            ]

        before = (self.by_key.get(keys[place - 1]) for place in alone())
        made.builds_on = {store for store in before if store is not None}
        while lost := [place for place in alone() if keys[place - 1] not in self.by_key]:
            made.refused += len(lost)
            known.difference_update(keys[place] for place in lost)
            new = [place for place in new if keys[place] in known]
        made.refused += max(0, len(new) - len(self.free))
        del new[len(self.free) :]
        made.keys = [keys[place] for place in new]
        made.before = [
            None if place in starts else b"" if place - 1 == last else keys[place - 1]
            for place, last in zip(new, [-2, *new], strict=False)
        ]
        made.slots = [self.free.pop() for _ in new]
        return made

    def begin(self, number: int, cell: int, store: PlannedStore) -> None:
        """A planned store is under way."""
        store.cell = cell
        self.by_id[number] = store
        self.by_key.update(dict.fromkeys(store.keys, number))

    def undo(self, store: PlannedStore) -> None:
        """A planned store could not begin."""
        self.free += store.slots

    def end(self, number: int) -> PlannedStore:
        """A store is over: nobody knows of it any more. Its slots are the caller's."""
        store = self.by_id.pop(number)
        for key in store.keys:
            if self.by_key.get(key) == number:
                del self.by_key[key]
        return store

    def publish(self) -> list[PlannedStore]:
        """Tell the service of the stores that have ended, each after those that it builds on.

        Returns:
            The stores of which no block is published, or of which the service cannot be told. They
            have ended.
        """
        over = []
        for number, store in list(self.by_id.items()):
            if not store.has_ended or store.is_told:  # told ones: see `lose_told`
                continue
            before = (self.by_id.get(each) for each in store.builds_on)
            if any(each is not None and not each.is_told for each in before):
                continue
            parts = store.parts(number)
            # In one statement: no error can come between the messages and the note of them.
            store.is_told = bool(parts) and self._line.put(*parts)
            if self._line.is_cut:
                self.free += store.slots
            else:
                self.give_back([store.slots[place] for place in store.dropped])
            if not store.is_told:
                over.append(self.end(number))
        return over

    def claim(self) -> None:
        """Tell a service that did not grant them which slots this engine has."""
        slots = sorted(self.granted)
        for start in range(0, max(len(slots), 1), wire.MOST_KEYS):
            part = slots[start : start + wire.MOST_KEYS]
            self._line.put(wire.Claim(part, start + wire.MOST_KEYS >= len(slots)))

    def lose_told(self) -> list[PlannedStore]:
        """The service is gone. Its index has the blocks of the stores that it was told of, or its
        successor frees their slots. Returns these stores, which have ended."""
        told = [self.end(number) for number, store in list(self.by_id.items()) if store.is_told]
        for store in told:
            self.granted.difference_update(store.slots)
        return told

    def discard_all(self) -> None:
        """Publish none of the stores under way. Their blocks may be stored anew."""
        for store in self.by_id.values():
            if not store.is_told:
                store.dropped.update(range(len(store.keys)))
        self.by_key.clear()

    def recover(self, under_way: Collection[int]) -> None:
        """After an error that may have lost some: the stores are those under way, and those that
        have ended; all other slots are free."""
        for number, store in list(self.by_id.items()):
            if number not in under_way and not store.has_ended:
                self.end(number)
        used = {slot for store in self.by_id.values() for slot in store.slots}
        self.free = sorted(self.granted - used)
