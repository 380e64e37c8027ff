# SPDX-License-Identifier: Apache-2.0
"""Processes to be killed: `python victim.py DIRECTORY SLOTS`.

For each line on its input, the seed of a random history, it forks a process that opens the tier
and writes blocks for ever. It prints that process's id, "working" once the tier is open, and
"gone" after it was killed.
"""

from __future__ import annotations

import os
import random
import sys

from disk_blocks import names, opened

KEYS = 400
BATCH = 40
"""Blocks that are written at once, at most."""


def say(line: str) -> None:
    """Write a line by one system call: a kill in the middle of a line would join it to the next,
    which another process writes."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def work(root: str, slots: int, seed: int) -> None:
    """Write, read, delete and evict blocks for ever."""
    chance = random.Random(seed)
    keys = names(KEYS)
    with opened(root, slots=slots) as client:
        say("working")
        while True:
            client.write(chance.sample(keys, chance.randint(1, BATCH)))
            client.read(chance.sample(keys, 5))
            if chance.random() < 0.1:
                client.delete(chance.sample(keys, 3))


def main() -> None:
    root, slots = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            say(str(os.getpid()))
            work(root, slots, int(line))
        os.waitpid(child, 0)
        say("gone")


if __name__ == "__main__":
    main()
