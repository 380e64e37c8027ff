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


@dataclass(slots=True, eq=False)
class PlannedStore:
    """A store.

    Attributes:
        keys: keys of its blocks.
        before: for each block the key of the one before it; None for the first of a prefix.
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
        kept = [place for place in range(len(self.keys)) if place not in self.dropped]
        made = []
        for start in range(0, len(kept), _PART):
            part = kept[start : start + _PART]
            keys: list[bytes] = []
            positions: list[int] = []
            starts: list[int] = []
            for place in part:
                parent = self.before[place]
                if parent is None:
                    starts.append(len(keys))
                elif not keys or keys[-1] != parent:
                    keys.append(parent)
                positions.append(len(keys))
                keys.append(self.keys[place])
            slots = [self.slots[place] for place in part]
            last = start + _PART >= len(kept)
            made.append(wire.Publish(number, self.cell, keys, positions, starts, slots, last))
        return made


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
        """The service may grant these slots to others."""
        self.granted.difference_update(slots)
        for start in range(0, len(slots), wire.MOST_KEYS):
            self._line.put(wire.Return(list(slots[start : start + wire.MOST_KEYS])))

    def plan(
        self, keys: Sequence[bytes], positions: Sequence[int], prefix_starts: Collection[int]
    ) -> PlannedStore:
        """A store of the blocks at `positions` that have no slot and can be found by a prefix, as
        far as there are slots, which it has taken. `begin` or `undo` follows."""
        absent, starts = set(self._reader.missing(keys)), set(prefix_starts)
        made, known = PlannedStore(), set[bytes]()
        for position in positions:
            key = keys[position]
            if position not in absent or key in self.by_key or key in known:
                continue
            parent = None if position in starts else keys[position - 1]
            if len(made.keys) == len(self.free):
                made.refused += 1
                continue
            if parent is not None and position - 1 in absent and parent not in known:
                store = self.by_key.get(parent)
                if store is None:
                    made.refused += 1
                    continue
                made.builds_on.add(store)
            made.keys.append(key)
            made.before.append(parent)
            known.add(key)
        made.slots = [self.free.pop() for _ in made.keys]
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
            if not store.has_ended or (store.is_told and not self._line.is_cut):
                continue
            before = (self.by_id.get(each) for each in store.builds_on)
            if any(each is not None and not each.is_told for each in before):
                continue
            store.is_told = True
            parts = store.parts(number)
            for part in parts:
                self._line.put(part)
            self.give_back([store.slots[place] for place in store.dropped])
            if self._line.is_cut or not parts:
                over.append(self.end(number))
        return over

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
