# SPDX-License-Identifier: Apache-2.0
"""`python -m packages.flexkv.tests.service.traffic ROOT SEED`: a scheduler with a rank that stores
and loads at random and checks every byte, until its input ends."""

from __future__ import annotations

import json
import random
import select
import sys
import time

from flexkv.client import Transfer
from flexkv.types.errors import ArenaError
from flexkv.types.mover import Direction, Status
from packages.flexkv.tests.service.served import FORMAT, Scheduler, keys_of

PROMPTS, MOST_BLOCKS, MOST_COPIES = 12, 6, 5


def bytes_of(key: bytes) -> bytes:
    """The bytes of a block."""
    return key.ljust(32, b".") * (FORMAT.slot_bytes // 32)


class Traffic:
    """Loads and stores of one scheduler, each in two halves."""

    def __init__(self, root: str, rng: random.Random) -> None:
        self.engine = Scheduler(root)
        self.rng = rng
        self.begun: list[Transfer] = []
        self.loaded = self.stored = 0

    def step(self) -> None:
        """Poll, and begin and end what chance wants."""
        cache = self.engine.cache
        cache.poll()
        keys = keys_of(f"p{self.rng.randrange(PROMPTS)}", self.rng.randint(1, MOST_BLOCKS))
        transfer = None
        if len(self.begun) < MOST_COPIES:
            if self.rng.random() < 0.5:
                transfer = cache.load(keys)
            elif missing := cache.missing(keys):
                transfer = cache.store(keys, missing)
            else:
                cache.touch(keys)
        if transfer is not None:
            self.begun.append(transfer)
            self._copy(transfer, 0)
        elif self.begun:
            self.end(self.rng.randrange(len(self.begun)))

    def end(self, place: int) -> None:
        """The second half of a transfer."""
        transfer = self.begun.pop(place)
        self._copy(transfer, 1)
        is_load = transfer.direction is Direction.LOAD
        status = Status.DONE if is_load or self.rng.random() < 0.95 else Status.FAILED
        self.engine.arena.board.report(transfer.cell, 0, status)
        self.loaded += is_load * len(transfer.keys)
        self.stored += (not is_load) * len(transfer.keys)

    def _copy(self, transfer: Transfer, half: int) -> None:
        size = FORMAT.slot_bytes // 2
        for key, slot in zip(transfer.keys, transfer.slots, strict=True):
            right = bytes_of(key)
            view = self.engine.arena.slot_view(slot)
            if transfer.direction is Direction.STORE:
                view[half * size : (half + 1) * size] = right[half * size : (half + 1) * size]
            else:
                assert bytes(view) == right, f"slot {slot} has {bytes(view)[:32]!r} for {key!r}"
            view.release()


def main(root: str, seed: int) -> None:
    """See the module."""
    while True:
        try:
            traffic = Traffic(root, random.Random(seed))
            break
        except ArenaError:  # the service is not there
            time.sleep(0.05)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(20):
            traffic.step()
    while traffic.begun:
        traffic.end(0)
    end = time.monotonic() + 20
    while traffic.engine.cache.busy and time.monotonic() < end:
        traffic.engine.cache.poll()
        time.sleep(0.001)
    print(json.dumps({"loaded": traffic.loaded, "stored": traffic.stored}), flush=True)
    traffic.engine.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
