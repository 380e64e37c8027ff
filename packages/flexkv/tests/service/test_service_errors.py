# SPDX-License-Identifier: Apache-2.0
"""An error before each line that the node's service executes, and its engines for it: the loop and
all engines go on, no byte is wrong, and no slot, lease, cell, pin, fetch, announcement or process
stays for ever, whether the service goes on or the next one does."""

from __future__ import annotations

import itertools
import random
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import flexkv.service
from flexkv.client import Hold, Reset, Transfer, TransferEnd
from flexkv.eviction import RequestContext
from flexkv.operators.ask_door import AskError
from flexkv.service import attach as attaching
from flexkv.service import attached, pool, pool_keys, server
from flexkv.service import messages as wire
from flexkv.service.pool import SharedPool
from flexkv.service.server import NodeServer
from flexkv.service.state import clear_pools, state_of
from flexkv.types.changes import Medium
from flexkv.types.mover import Direction, Status
from packages.flexkv.tests.service.served import (
    ENGINE,
    Scheduler,
    Service,
    attached_again,
    keys_of,
    until,
)
from packages.flexkv.tests.service.traffic import bytes_of
from packages.inside import (
    announced,
    announced_keys,
    assert_no_lease,
    assert_served_rest,
    index_of,
    line_of,
    open_fetches,
    stores_of,
    turn_of_server,
    waiting_newcomers,
)
from packages.line_errors import InjectedError, LineErrors

Result = TypeVar("Result")

CODE = [Path(flexkv.service.__path__[0])]
BLOCKS = 4
"""Of a prompt."""
QUIET = 2
"""Rounds without a new error before a test ends."""

SPARED = {
    "server.py": {
        *("run", "_turn", "_guard", "_guard_engine", "_log_error", "engines", "pools"),
        *("stop", "_awake", "close", "__init__", "<lambda>", "<listcomp>"),
        *("<dictcomp>", "_make_pool", "_resume_pool"),
    },
    "pool.py": {"create", "resume"},
    "attached.py": {"_let_go", "scheduler"},
}
"""Functions whose lines are spared: the loop and its guards, what ends the process, and those that
hand memory or a reader from one owner to the next, in statements that cannot fail."""


def is_spared(file: str, function: str) -> bool:
    return function in SPARED.get(Path(file).name, ())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long before another try or for what has ended."""
    monkeypatch.setattr(attaching, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(attaching, "_MOST_SECONDS", 0.02)
    monkeypatch.setattr(attached, "_LAST_WRITES_SECONDS", 0.01)
    monkeypatch.setattr(server, "_GONE_SECONDS", 0.01)
    monkeypatch.setattr(pool_keys, "ANNOUNCED_SECONDS", 0.5)


class Engine:
    """What an engine does with its cache. Any call may raise; then the cache recovers.

    Args:
        one: its scheduler.
        arm: lets the next line fail in this thread.
        disarm: ends that.
    """

    def __init__(self, one: Scheduler, arm: Callable[[], None], disarm: Callable[[], None]) -> None:
        self.one = one
        self.cache = one.cache
        self._arm_next, self._disarm = arm, disarm
        self.may_fail = True
        self._transfers: list[Transfer] = []
        self._requests = itertools.count()
        self.known: dict[Medium, set[bytes]] = {Medium.HOST: set(), Medium.DISK: set()}
        self._watch()

    def _arm(self) -> None:
        if self.may_fail:
            self._arm_next()

    def call(self, call: Callable[[], Result]) -> Result | None:
        """What a call returns; None if it raises."""
        self._arm()
        try:
            return call()
        except InjectedError:
            self._recover()
            return None
        finally:
            self._disarm()

    def _recover(self) -> None:
        self._disarm()
        self.cache.reset(Reset.RECOVER)
        for number in self.cache.status.under_way.keys() - {each.id for each in self._transfers}:
            self.cache.end_transfer(number, TransferEnd.CANCEL)

    def _watch(self) -> None:
        """All that is there is told anew."""
        for there in self.known.values():
            there.clear()
        while self.call(lambda: (self.cache.watch(), True)) is None:  # type: ignore[func-returns-value]
            pass

    def follow(self) -> None:
        """Poll, and apply all changes of blocks."""
        self.call(self.cache.poll)
        if not self.cache.status.has_changes:
            return
        self._arm()
        try:
            changes = self.cache.drain_changes()
        except (InjectedError, RuntimeError):
            self._recover()
            self._watch()
            return
        finally:
            self._disarm()
        for each in changes:
            there = self.known[each.medium]
            assert there.issuperset(each.removed), "a block leaves that was not there"
            assert there.isdisjoint(each.added), "a block comes twice"
            there.difference_update(each.removed)
            there.update(each.added)

    def begin(self, keys: list[bytes], direction: Direction) -> Transfer | None:
        cache = self.cache
        transfer = self.call(
            (lambda: cache.load(keys))
            if direction is Direction.LOAD
            else (lambda: cache.store(keys, cache.missing(keys)))
        )
        if transfer is not None:
            self._transfers.append(transfer)
        return transfer

    def end_copies(self, status: Status = Status.DONE) -> None:
        """As the rank: write or compare all bytes of each block, and report."""
        for transfer in self._transfers:
            for key, slot in zip(transfer.keys, transfer.slots, strict=True):
                view = self.one.arena.slot_view(slot)
                if transfer.direction is Direction.STORE:
                    view[:] = bytes_of(key)
                else:
                    assert bytes(view) == bytes_of(key), f"slot {slot} for {key!r}"
                view.release()
            self.one.arena.board.report(transfer.cell, 0, status)
        self._transfers.clear()
        self.follow()

    def has_stored(self, keys: list[bytes]) -> bool:
        """Whether blocks are found. Stores them unless they are: a clear of the pool voids stores
        to slots that were granted before."""
        self.follow()
        if self.cache.missing(keys) and len(stores_of(self.cache).free) >= len(keys):
            assert self.begin(keys, Direction.STORE) is not None
            self.end_copies()
        return self.cache.lookup(keys) == len(keys)

    def compute(self, keys: list[bytes], *, status: Status = Status.DONE) -> None:
        """A request computes blocks, which are stored."""
        cache, name = self.cache, f"r{next(self._requests)}"
        found = cache.lookup(keys)
        context = RequestContext(len(keys), found, name, "session", stores=True)
        self.call(lambda: cache.record(keys[:found], context, keys))
        self.call(lambda: cache.describe(dict.fromkeys(keys, b"text")))
        self.begin(keys, Direction.STORE)
        self.follow()
        self.end_copies(status)
        self.call(lambda: cache.touch(keys))
        self.call(lambda: cache.ended(name, 3))

    def load(self, keys: list[bytes]) -> None:
        """Load what of these is in host memory, or comes from a disk or another engine."""
        cache, arrived = self.cache, 0
        self.call(lambda: line_of(cache).put(wire.Query(keys[:1], keys[1:])))
        self.call(lambda: cache.presence(keys))
        fetch = self.call(lambda: cache.fetch(keys[:2], queued=True))
        if fetch is None:
            arrived = self.call(lambda: cache.lookup(keys)) or 0
        else:
            self.call(lambda: cache.extend_fetch(fetch, keys[2:]))
            self.call(lambda: cache.extend_fetch(fetch, raise_priority=True))
            for _ in range(50):
                state = self.call(lambda: cache.fetch_state(fetch))
                if state is None or state.done:
                    break
                arrived = state.arrived
                self.follow()
        if arrived:
            self.begin(keys[:arrived], Direction.LOAD)
            self.end_copies()
        if fetch is not None:
            self.call(lambda: cache.end_fetch(fetch))

    def rest(self) -> None:
        """It does nothing any more, and its pins end."""
        self.end_copies()
        self.cache.unhold(Hold.PIN, "me")
        self.follow()


class World:
    """A service, two engines that stay, and one that is killed now and then."""

    def __init__(
        self,
        service: Service,
        attach: Callable[..., Scheduler],
        start: Callable[..., subprocess.Popen[str]],
        errors: LineErrors,
        *,
        in_service: bool,
    ) -> None:
        self.service = service
        self.errors = errors
        self._start = start
        self._attach = attach
        self.rng = random.Random(5)
        arm, disarm = (lambda: None, lambda: None) if in_service else (errors.arm, errors.disarm)
        self.engines = [Engine(attach(service, step_blocks=BLOCKS), arm, disarm) for _ in range(2)]
        self._in_service = in_service
        self.spared_turns = 0  # of the service, since it has no more errors
        self._numbers = itertools.count()
        self._prompts: list[list[bytes]] = []

    def keys(self) -> list[bytes]:
        """A prompt that was computed before."""
        return self.rng.choice(self._prompts[-6:])

    def round(self) -> None:
        self.dare()
        one, other = self.rng.sample(self.engines, 2)
        number = next(self._numbers)
        keys = keys_of(f"p{number}", BLOCKS)
        self._prompts.append(keys)
        one.call(lambda: one.cache.hold(Hold.PIN, self.keys()[:2], "me", 100.0))
        one.call(lambda: one.cache.hold(Hold.RETAIN, self.keys(), "me too", 0.01))
        transfer = one.begin(keys, Direction.STORE)
        other.load(keys)
        if transfer is not None and number % 5 == 1:
            one.call(
                lambda: one.cache.end_transfer(
                    transfer.id, TransferEnd.DISCARD, [len(transfer.keys) - 1]
                )
            )
        one.end_copies(Status.FAILED if number % 5 == 2 else Status.DONE)
        for each in one, other:
            each.compute(keys_of(f"{each.one.ticket.client} {number}", BLOCKS))
            each.load(self.keys())
            each.call(lambda each=each: each.cache.demote(self.keys()[2:]))  # type: ignore[misc]
            each.load(self.keys())
        one.call(lambda: one.cache.unhold(Hold.RETAIN, "me too", self.keys()))
        one.call(lambda: one.cache.unhold(Hold.PIN, "me"))
        if number % 4 == 3:
            one.call(lambda: one.cache.reset(Reset.CLEAR))
            if one.cache.status.disabled:  # see `CacheClient.reset`
                one.cache.reset(Reset.CLEAR)
            other.call(lambda: other.cache.reset(Reset.PAUSE))
        self.ask()

    def ask(self) -> None:
        """An operator looks, and may clear the pool."""
        try:
            state_of(self.service.root)
            if self.rng.random() < 0.2:
                clear_pools(self.service.root, None)
        except AskError:
            assert self.errors.hit

    def kill_one(self) -> None:
        """Another engine comes, stores, holds blocks, orders a store, and is killed."""
        process = self._start(ENGINE, self.service.root)
        assert process.stdout is not None
        until(lambda: select.select([process.stdout], [], [], 0)[0])
        process.kill()
        process.wait()

    def dare(self) -> None:
        """Errors may come."""
        self.spared_turns = 0
        for each in self.engines:
            each.may_fail = True

    def spare(self) -> None:
        """No error comes until `dare`."""
        for each in self.engines:
            each.may_fail = False
        if self._in_service:
            self.spared_turns = 1
            until(lambda: self.spared_turns > 2)

    def restart(self) -> None:
        """Errors may come while engines attach to the next service."""
        self.dare()
        self.service.close()
        self.service.start()
        until(lambda: attached_again(self.service, *(each.one for each in self.engines)))

    def check(self) -> None:
        """Nothing is lost, and all goes on."""
        service, ones = self.service, [each.one for each in self.engines]
        assert service.is_serving
        self.spare()
        until(lambda: attached_again(service, *ones))
        for each in self.engines:
            each.rest()
            until(
                lambda each=each: not each.cache.busy and not each.cache.status.has_changes,  # type: ignore[misc]
                each.follow,
            )
        until(lambda: len(service.server.engines) == len(ones))
        for each in self.engines:
            keys = keys_of(f"check {next(self._numbers)}", 2)
            until(lambda each=each, keys=keys: each.has_stored(keys))  # type: ignore[misc]
            for reader in self.engines:
                assert reader.begin(keys, Direction.LOAD) is not None
                reader.end_copies()
        cache = service.pool.cache
        until(self._is_at_rest, lambda: [each.follow() for each in self.engines])
        for each in self.engines:
            assert_served_rest(each.cache)
        assert_no_lease(cache)

    def _is_at_rest(self) -> bool:
        """Whether nothing is under way in the pool, and all engines know what it has."""
        service, shared = self.service, self.service.pool
        cache = shared.cache
        engines = {each.number: each for each in service.server.engines}
        here = {block.key for block in index_of(cache).blocks}
        listed = {key for part in cache.listed() for key in part}
        return (
            service.accounted()
            and not shared.busy
            and not open_fetches(cache)
            and not announced(cache)
            and not len(announced_keys(shared))
            and cache.pinned_blocks == 0
            and waiting_newcomers(service.server) == 0
            and all(
                stores_of(each.cache).granted == set(cache.index.taken_by(each.one.ticket.client))
                and engines[each.one.ticket.client].granted == len(stores_of(each.cache).granted)
                and each.known[Medium.HOST] == here
                and each.known[Medium.DISK] | here >= listed
                for each in self.engines
            )
        )


def fail_everywhere(world: World) -> None:
    errors, quiet, rounds = world.errors, 0, 0
    while quiet < QUIET:
        before = len(errors.hit)
        try:
            for _ in range(3):
                world.round()
            if rounds % 4 == 0:
                world.kill_one()
            if rounds % 3 == 0:
                world.restart()
                world.round()
            world.check()
        except BaseException as error:
            hit = [f"{Path(file).name}:{line}" for file, line in errors.hit[before:]]
            error.add_note(f"after errors before {hit}")
            raise
        rounds += 1
        quiet = 0 if len(errors.hit) > before else quiet + 1


@pytest.fixture
def world(
    make_service: Callable[..., Service],
    attach: Callable[..., Scheduler],
    other_process: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> Callable[..., World]:
    service = make_service(
        8 * BLOCKS,  # each of two engines is granted the slots of a prompt
        eviction_policy="lru",
        ssd_cache_gb=0.01,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=60.0,
    )

    def make(errors: LineErrors, *, in_service: bool) -> World:
        return World(service, attach, other_process, errors, in_service=in_service)

    return make


def test_an_error_before_any_line_of_the_service_costs_nothing(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = LineErrors(CODE, is_spared)
    lines = enumerate(Path(pool.__file__).read_text().splitlines(), 1)
    # As in `SPARED`.
    errors.spare((pool.__file__, at) for at, text in lines if "undo.callback(memory.close)" in text)
    made = world(errors, in_service=True)
    turn = turn_of_server()

    def armed_turn(self: NodeServer, now: float) -> bool:
        if made.spared_turns:
            errors.disarm()
            made.spared_turns += 1
            return turn(self, now)
        errors.arm()
        try:
            return turn(self, now)
        finally:
            errors.arm()  # for what comes from the engines

    def armed(make: Callable[..., SharedPool]) -> Callable[..., SharedPool]:
        def call(*arguments: Any) -> SharedPool:
            if not made.spared_turns:
                errors.arm()
            try:
                return make(*arguments)
            finally:
                errors.disarm()

        return call

    for name in ("_make_pool", "_resume_pool"):  # in another thread
        monkeypatch.setattr(server, name, armed(getattr(server, name)))
    monkeypatch.setattr(NodeServer, "_turn", armed_turn)
    fail_everywhere(made)
    assert len(errors.hit) > 100


def test_an_error_before_any_line_of_an_engine_costs_nothing(
    world: Callable[..., World],
) -> None:
    errors = LineErrors(CODE, is_spared)
    fail_everywhere(world(errors, in_service=False))
    assert len(errors.hit) > 60
