# SPDX-License-Identifier: Apache-2.0
"""`python -m packages.flexkv.tests.service.hostile ROOT SEED`: processes that greet, attach, and
send and write what chance wants."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Callable, Sequence

from flexkv.client import Hold
from flexkv.eviction import RequestContext
from flexkv.host.board import CELLS
from flexkv.service import messages as wire
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.types.errors import ArenaError
from flexkv.types.mover import Status
from flexkv.types.tenants import LARGEST_TENANT, tenant_number
from packages.flexkv.tests.service.served import ABOUT, Scheduler, keys_of
from packages.inside import line_of, memory_of, page_of, waiting_packets

ENGINES, MESSAGES, GREETINGS = 6, 40, 10
_INTEGERS = (0, 1, -1, 63, 64, 255, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63))
_SIZES = (0, 1, -1, 4096, 4095, 1 << 40, 1 << 62)


class Chance:
    """Makes messages whose types are right and whose contents are not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def integer(self) -> int:
        return self.rng.choice((*_INTEGERS, self.rng.randrange(64), self.rng.randrange(5000)))

    def key(self) -> bytes:
        rng = self.rng
        if rng.random() < 0.5:
            return keys_of(f"evil {rng.randrange(4)}", 1, rng.randrange(8))[0]
        return rng.randbytes(rng.choice((0, 1, 16, 96, 97, 4000)))

    def many(self, make: Callable[[], object]) -> list[object]:
        return [make() for _ in range(self.rng.choice((0, 1, 2, 5, 40, 511, 513)))]

    def keys(self) -> list[bytes]:
        if self.rng.random() < 0.5:
            return keys_of(f"evil {self.rng.randrange(4)}", self.rng.randrange(20))
        return self.many(self.key)  # type: ignore[return-value]

    def slots(self) -> list[int]:
        return self.many(self.integer)  # type: ignore[return-value]

    def text(self) -> str:
        return self.rng.choice(("", "r", "\x1b[2J", "x" * 3000, "\0", "é"))

    def tenant(self) -> int:
        return self.rng.choice((0, 1, tenant_number("a"), LARGEST_TENANT))

    def kind(self) -> Hold:
        return self.rng.choice((Hold.PIN, Hold.RETAIN))

    def seconds(self) -> float | None:
        return self.rng.choice((None, 0.0, -1.0, 1e-9, 5.0, 1e300, float("inf"), float("nan")))

    def context(self) -> RequestContext | None:
        if self.rng.random() < 0.3:
            return None
        returns = self.rng.choice((None, True, False))
        stores = self.rng.random() < 0.5
        names = self.text(), self.text()
        return RequestContext(
            self.integer(), self.integer(), *names, returns, self.integer(), stores
        )

    def publish(self) -> wire.Publish:
        keys = self.keys()
        before = [self.rng.choice((None, b"", self.key())) for _ in keys]
        slots = self.slots() if self.rng.random() < 0.5 else [self.integer() for _ in keys]
        of_key = self.tenant if self.rng.random() < 0.8 else self.integer
        tenants = [of_key() for _ in keys[: self.rng.choice((0, 1, len(keys)))]]
        return wire.Publish(self.integer(), keys, before, slots, tenants, self.rng.random() < 0.5)

    def describe(self) -> wire.Describe:
        keys = self.keys()
        count = self.rng.choice((len(keys), len(keys), self.rng.randrange(4)))
        return wire.Describe(
            keys, [self.rng.randbytes(self.rng.choice((0, 9, 99))) for _ in range(count)]
        )

    def blocks(self) -> wire.PoolBlocks:
        rng = self.rng
        if rng.random() < 0.3:
            fmt = ABOUT.spec.format
            return wire.PoolBlocks(ABOUT.fingerprint, 1, fmt.shard_bytes, 1, ABOUT.identity)
        shards = tuple(rng.choice(_SIZES) for _ in range(rng.choice((0, 1, 2, 70))))
        fingerprint = rng.choice(("same", "", "x" * 200, "../../etc", "other"))
        return wire.PoolBlocks(fingerprint, self.integer(), shards, self.integer(), ("a", "\x1b"))

    def ticket(self) -> wire.Ticket:
        return wire.Ticket(self.integer(), self.rng.randbytes(self.rng.choice((0, 16, 17))))

    def greeting(self) -> wire.ToService:
        protocol = self.rng.choice((wire.PROTOCOL,) * 5 + (0, 1, -1))
        match self.rng.randrange(4):
            case 0:
                return wire.Open(protocol, self.text(), self.text(), self.blocks())
            case 1:
                return wire.Join(protocol, self.ticket())
            case 2:
                return wire.Schedule(protocol, self.ticket(), self.integer(), self.integer())
        size, step, names = self.integer(), self.integer(), (self.text(), self.text())
        blocks, tenant = self.blocks(), self.integer()
        return wire.Resume(protocol, self.ticket(), *names, blocks, size, step, tenant)

    def message(self) -> wire.ToService:
        choices: Sequence[Callable[[], wire.ToService]] = (
            self.publish,
            self.greeting,
            lambda: wire.Announce(self.integer(), self.keys()),
            lambda: wire.Retract(self.rng.choice((None, self.integer()))),
            lambda: wire.Claim(self.slots(), self.rng.random() < 0.5),
            lambda: wire.Return(self.slots()),
            lambda: wire.RecordUse(self.keys(), self.integer(), self.keys(), self.context()),
            lambda: wire.Touch(self.keys()),
            lambda: wire.RequestEnded(self.text(), self.integer()),
            lambda: wire.HoldBlocks(self.kind(), self.keys(), self.text(), self.seconds()),
            lambda: wire.UnholdBlocks(self.kind(), self.text(), self.keys()),
            lambda: wire.Demote(self.keys()),
            lambda: wire.Fetch(
                *(self.integer(), self.keys(), self.rng.random() < 0.5, self.tenant()),
                *(self.integer(), self.integer()),
            ),
            lambda: wire.ExtendFetch(self.integer(), self.keys(), self.rng.random() < 0.5),
            lambda: wire.EndFetch(self.integer()),
            lambda: wire.Watch(self.integer()),
            self.describe,
            lambda: wire.Query(self.keys(), self.keys()),
        )
        return self.rng.choice(choices)()

    def packet(self) -> bytes:
        """Mostly whole messages; some are damaged, and some are noise."""
        rng = self.rng
        with contextlib.suppress(wire.WireError, ValueError):
            packets = wire.packets([self.message() for _ in range(rng.choice((1, 1, 3)))])
            sent = bytearray(packets[0])
            if rng.random() < 0.1:
                for _ in range(rng.randint(1, 4)):
                    sent[rng.randrange(len(sent))] = rng.randrange(256)
            return bytes(sent)
        return rng.randbytes(rng.randint(1, 300))

    def file(self) -> int:
        """A descriptor that a service may be sent."""
        match self.rng.randrange(4):
            case 0:
                return os.open("/dev/zero", os.O_RDWR)
            case 1:
                made, other = os.pipe()
                os.close(other)
                return made
            case 2:
                return wire.own_process()
        made = os.memfd_create("evil", os.MFD_ALLOW_SEALING)
        os.ftruncate(made, self.rng.choice((0, 1, 4096, 1 << 20)))
        return made


def greet(root: str, chance: Chance) -> None:
    """Greet the service, with descriptors of all kinds, and leave."""
    greeting = chance.greeting()
    files = [chance.file() for _ in range(chance.rng.randrange(5))]
    if chance.rng.random() < 0.8:
        more = 3 if isinstance(greeting, wire.Resume) else 0
        files = [wire.own_process(), *(chance.file() for _ in range(more))]
    say(root, chance, greeting, files)


def say(root: str, chance: Chance, greeting: wire.ToService, files: Sequence[int]) -> None:
    """Send a greeting with descriptors, which are closed, and mostly hear the answer."""
    with RuntimeDirectory(root) as directory:
        connection = directory.connect(wire.SOCKET, 5.0, socket.SOCK_SEQPACKET)
    with connection:
        try:
            with contextlib.suppress(wire.WireError, OSError):
                socket.send_fds(connection, wire.packets([greeting])[:1], files)
            if chance.rng.random() < 0.7:
                with contextlib.suppress(OSError):
                    connection.settimeout(1.0)
                    _, came = wire.receive_greeting(connection)
                    for fd in came:
                        os.close(fd)
        finally:
            for fd in files:
                os.close(fd)


def attach(root: str, chance: Chance) -> None:
    """Attach as an engine, write to its page and its board, and send until it is given up."""
    rng = chance.rng
    try:
        one = Scheduler(root)
    except ArenaError:
        return
    page, line = page_of(one.cache), line_of(one.cache)
    one.store(keys_of(f"evil {rng.randrange(4)}", 4))
    for _ in range(MESSAGES):
        match rng.randrange(7):
            case 0:
                place = rng.randrange(len(page.holds))
                page.holds[place] = rng.randrange(256)
            case 1:
                page.bell[rng.randrange(len(page.bell))] = rng.randrange(1 << 32)
            case 2:
                with contextlib.suppress(Exception):
                    one.arena.board.report(rng.randrange(CELLS), 0, rng.choice(list(Status)))
            case 3:
                page.fetches[rng.randrange(len(page.fetches))] = rng.randrange(256)
            case _:
                waiting_packets(line).append(chance.packet())
                line.send()
        if line.is_cut:
            break
    if rng.random() < 0.5:
        # It wants to go on, with its own memory in any order.
        ticket = wire.Ticket(one.ticket.client, bytes.fromhex(one.ticket.token))
        fmt = ABOUT.spec.format
        blocks = wire.PoolBlocks(ABOUT.fingerprint, 1, fmt.shard_bytes, 1, ABOUT.identity)
        slots = rng.choice((one.arena.spec.num_slots, chance.integer()))
        greeting = wire.Resume(
            wire.PROTOCOL, ticket, "again", "toy", blocks, slots, chance.integer(), chance.tenant()
        )
        memory = [os.dup(fd) for fd in memory_of(one.cache, one.arena)]
        rng.shuffle(memory)
        say(root, chance, greeting, [wire.own_process(), *memory])
    # It ends without a word, as a process that was killed.


def main(root: str, seed: int) -> None:
    """See the module."""
    chance = Chance(seed)
    for _ in range(GREETINGS):
        greet(root, chance)
    for _ in range(ENGINES):
        attach(root, chance)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
