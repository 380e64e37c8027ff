# SPDX-License-Identifier: Apache-2.0
"""The service's loop: greets processes of engines, and serves one packet of each in turn."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from flexkv.service import messages as wire
from flexkv.service.attached import AttachedEngine, Process
from flexkv.service.endpoints import Operators
from flexkv.service.lobby import Lobby, Newcomer, RefusalError
from flexkv.service.page import MOST_ENGINES
from flexkv.service.pool import PoolMemory, SharedPool, slot_bytes_of
from flexkv.service.pool_sizes import NoRoomError, PoolFile, PoolSizes, sizes_of_settings
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.settings import GIB, CacheConfig
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_BUSY_SECONDS = 0.001
"""Pause of the loop while a tier works. Not tuned."""
_IDLE_SECONDS = 0.05
"""Pause of the loop while nothing happens. Not tuned."""

_AWAITED_SECONDS = 10.0
"""Seconds after the start in which engines of the service before this one hand their memory back.
An engine that starts meanwhile waits: with memory of its own, it would not share with them."""
_GONE_SECONDS = 1.0
"""Seconds between two looks whether engines have ended that a service before this one has left."""

_LOGGED_SECONDS = 60.0
"""Seconds between two lines about errors of one kind."""


class NodeServer:
    """The service of one user on a node, in a runtime directory with mode 0700. Single-threaded;
    `run` returns after `stop`. `figures` is a listening socket at which its figures are served by
    HTTP; owned. Without `pools`, their sizes are those of the settings.

    Raises ArenaError if the directory cannot be used, or a service of this user runs there.
    """

    def __init__(
        self,
        root: str,
        config: CacheConfig,
        figures: socket.socket | None = None,
        pools: PoolFile | None = None,
    ) -> None:
        self._config = config
        self._sizes = PoolSizes(pools or sizes_of_settings(config))
        self._pools: dict[wire.PoolBlocks, SharedPool] = {}
        self._engines: dict[tuple[wire.PoolBlocks, int], AttachedEngine] = {}
        self._selector = selectors.DefaultSelector()
        self._stops = self._is_closed = False
        self._logged_at: dict[str, float] = {}  # by what was logged
        self._looked_at = 0.0
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with ExitStack() as undo:
            self._directory = RuntimeDirectory(root, create=True)
            undo.callback(self._directory.close)
            if figures is not None:
                undo.callback(figures.close)
            listener = self._directory.listen(wire.SOCKET, socket.SOCK_SEQPACKET)
            undo.callback(listener.close)
            self._lobby = Lobby(listener, self._watch, self._unwatch, self._is_ready, self._admit)
            self._operators = Operators(
                self._directory,
                figures,
                config,
                pools=self._pools,
                engines=self._engines,
                refused=self._lobby.refused,
                wake=self._awake,
            )
            undo.pop_all()
        self._room = bytearray(wire.MAX_PACKET)
        self._threads = ThreadPoolExecutor(1, "flexkv-pools")
        # With who takes it, or its error, as long as that one waits.
        self._making: dict[wire.PoolBlocks, tuple[Newcomer, Future[SharedPool]]] = {}
        self._awaits_until = 0.0
        try:
            if self._directory.is_held(wire.ENGINES):
                self._awaits_until = time.monotonic() + _AWAITED_SECONDS
        except OSError as error:
            logger.warning("cannot see whether engines wait for this service: %s", error)
        self._watch(self._wake, lambda: os.read(self._wake, 1))

    @property
    def engines(self) -> Sequence[AttachedEngine]:
        """The engines that are attached, or whose processes have not all ended."""
        return list(self._engines.values())

    @property
    def pools(self) -> Sequence[SharedPool]:
        """All pools."""
        return list(self._pools.values())

    def run(self) -> None:
        """Serve until `stop`."""
        is_busy = False
        while not self._stops:
            ready = self._selector.select(_BUSY_SECONDS if is_busy else _IDLE_SECONDS)
            for key, _ in ready:
                self._guard("a peer could not be served", key.data)
            is_busy = self._turn(time.monotonic())

    def stop(self) -> None:
        """Let `run` return. May be called in a signal handler, or in another thread."""
        self._stops = True
        self._awake()

    def _awake(self) -> None:
        """Let the loop begin a turn. May be called in a signal handler, or in another thread."""
        with contextlib.suppress(OSError):
            os.write(self._woken, b"x")

    def close(self, flush_seconds: float) -> None:
        """Stop listening, and close the pools; lower tiers may write waiting blocks for
        `flush_seconds`. Engines keep the memory that they have, and load what is in it.
        Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._operators.close()
        self._directory.remove(wire.SOCKET)
        self._lobby.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for _, making in self._making.values():
            making.add_done_callback(_close)
        self._making.clear()
        self._directory.close()
        for engine in self._engines.values():
            engine.close()
        for pool in self._pools.values():
            pool.close(flush_seconds)
        self._selector.close()
        os.close(self._wake)
        woken, self._woken = self._woken, -1
        os.close(woken)

    # Newcomers.

    def _is_ready(self, newcomer: Newcomer) -> bool:
        """Whether a newcomer can be let in. If its pool is missing, begins to make it, unless
        engines that live may bring it. Raises why it cannot be made."""
        greeting = newcomer.greeting
        if not isinstance(greeting, wire.Open | wire.Resume):
            return True
        blocks = greeting.blocks
        first, made = self._making.get(blocks, (newcomer, None))
        if blocks in self._pools:
            self._making.pop(blocks, None)
        elif made is None:
            self._make(newcomer, greeting)
        elif made.done() and (first is newcomer or first.pidfd < 0):
            self._take(greeting, made)
        return blocks in self._pools

    def _make(self, newcomer: Newcomer, greeting: wire.Open | wire.Resume) -> None:
        """Make a pool in a thread: to fill hundreds of GiB takes seconds to minutes, and the loop
        serves all others meanwhile."""
        blocks = greeting.blocks
        with ExitStack() as undo:
            undo.callback(self._sizes.give_back, blocks)
            if isinstance(greeting, wire.Resume):
                config = self._size_resumed(greeting)
                taken = [os.dup(fd) for fd in newcomer.memory]
                make = partial(_resume_pool, config, greeting, taken)
            elif time.monotonic() < self._awaits_until:
                return
            else:
                make = partial(_make_pool, self._size(greeting), greeting)
            # In one statement: no error loses a pool that is being made.
            self._making[blocks] = newcomer, (making := self._threads.submit(make))
            undo.pop_all()
        making.add_done_callback(lambda _: self._awake())

    def _size(self, greeting: wire.Open) -> CacheConfig:
        """The settings of a new pool. Pools without engines and without an entry end for it. Raises
        NoRoomError if the pools of other models have all memory."""
        blocks = greeting.blocks
        while True:
            try:
                size = self._sizes.take(blocks, greeting.model, slot_bytes_of(blocks))
            except NoRoomError:
                if not self._end_idle_pool(named=False):
                    raise
                continue
            if self._config.ssd_cache_gb is not None and size.disk is None:
                logger.info("the pool of %r has no room on disk", greeting.model)
            return size.applied(self._config)

    def _size_resumed(self, greeting: wire.Resume) -> CacheConfig:
        """The settings of a pool that engines hand back, which keeps its memory."""
        slot_bytes = slot_bytes_of(greeting.blocks)
        memory = greeting.slots * slot_bytes / GIB
        size, planned = self._sizes.resume(greeting.blocks, greeting.model, memory)
        if planned is not None and abs(planned - memory) * GIB >= slot_bytes:
            logger.warning(
                "the pool of %r keeps the %.2f GiB of memory that its engines hand back; a new "
                "pool has %.2f GiB: end all its engines before the service starts again",
                greeting.model,
                memory,
                planned,
            )
        return size.applied(self._config)

    def _take(self, greeting: wire.Open | wire.Resume, made: Future[SharedPool]) -> None:
        """Serve a pool that has been made. Raises why there is none, unless the end of another
        makes room for the next attempt."""
        blocks = greeting.blocks
        try:
            self._begin_pool(blocks, made.result())
        except Exception as error:
            self._drop(blocks, made)
            is_short = isinstance(error, ArenaError) and isinstance(greeting, wire.Open)
            if not (is_short and self._end_idle_pool()):
                raise
        self._making.pop(blocks, None)

    def _drop(self, blocks: wire.PoolBlocks, made: Future[SharedPool]) -> None:
        """A pool could not be made, or cannot be served."""
        if blocks not in self._pools:
            self._sizes.give_back(blocks)
            for key in [key for key in self._engines if key[0] == blocks]:
                self._engines.pop(key).close()
            _close(made)
        self._making.pop(blocks, None)

    def _begin_pool(self, blocks: wire.PoolBlocks, pool: SharedPool) -> None:
        """Serve a pool, for the engines, too, that used it under the service before this one."""
        for number in range(1, MOST_ENGINES + 1):
            if pool.is_used_by(number) or pool.cache.index.taken_by(number):
                name = f"number {number}"
                self._engines[blocks, number] = AttachedEngine(name, pool, number, begun=True)
        self._pools[blocks] = pool
        self._share(pool)
        logger.info(
            "a pool of %d blocks for the model %r, fingerprint %s, %d of them from before",
            pool.num_slots,
            pool.model,
            blocks.fingerprint,
            pool.cache.ready_blocks,
        )

    def _end_idle_pool(self, *, named: bool = True) -> bool:
        """End a pool without engines, because memory for another is missing; one that has an entry
        of its own only if `named`. Returns False if there is none."""
        used = {each for each, _ in self._engines}
        idle = (each for each in self._pools if each not in used)
        found = next((each for each in idle if named or not self._sizes.is_named(each)), None)
        if found is None:
            return False
        logger.info("the pool of fingerprint %s ends for another", found.fingerprint)
        self._pools.pop(found).close(0.0)
        self._sizes.give_back(found)
        return True

    def _admit(self, newcomer: Newcomer) -> None:
        """Let a process in. It is known before it is told so."""
        process = Process(newcomer.connection, newcomer.pidfd)
        greeting = newcomer.greeting
        answer: wire.ToEngine
        lent: list[int] = []
        with ExitStack() as undo:
            if isinstance(greeting, wire.Open):
                engine = self._open(greeting)
                undo.callback(self._forget, engine)
                spec = engine.pool.arena.spec
                assert engine.ticket is not None
                answer = wire.Opened(engine.ticket, spec.num_slots, spec.boards)
                lent = [engine.pool.arena.fd]
            elif isinstance(greeting, wire.Resume):
                engine = self._resumed(greeting, newcomer.memory[0])
                pool = engine.pool
                answer, lent = wire.Resumed(pool.has_shares), [pool.below.fd, pool.announced.fd]
                undo.callback(engine.leave, process)
                self._resume(engine, greeting, process)
            else:
                engine = self._named(greeting.ticket)
                answer = wire.Joined()
                if isinstance(greeting, wire.Schedule):
                    undo.callback(engine.leave, process)
                    lent = engine.schedule(process, greeting, self._mates(engine))
                    info = engine.pool.cache.info
                    shares, policy = engine.pool.has_shares, engine.pool.policy
                    answer = wire.Scheduled(info.media, info.must_query, policy, shares)
            undo.callback(setattr, newcomer, "pidfd", newcomer.pidfd)
            undo.callback(setattr, process, "pidfd", -1)
            newcomer.pidfd = -1
            undo.callback(engine.processes.discard, process)
            engine.joined(process)
            undo.callback(self._unwatch, process.pidfd)
            self._watch(process.pidfd, self._ended)
            undo.callback(self._unwatch, process.connection)
            self._watch(process.connection, lambda: self._serve(engine, process))
            (packet,) = wire.packets([answer])
            try:
                socket.send_fds(process.connection, [packet], lent)
            except OSError:
                if not isinstance(greeting, wire.Resume):
                    raise
                # An engine that is served again, and has gone meanwhile, leaves as any other.
            undo.pop_all()

    def _open(self, greeting: wire.Open) -> AttachedEngine:
        blocks = greeting.blocks
        used = {number for each, number in self._engines if each == blocks}
        free = (number for number in range(1, MOST_ENGINES + 1) if number not in used)
        number = next(free, None)
        if number is None:
            raise RefusalError(f"the pool has {MOST_ENGINES} engines; allowed: no more")
        # In one statement: an engine that nobody knows would be a reader of the index for ever.
        self._engines[blocks, number] = engine = AttachedEngine(
            greeting.engine, self._pools[blocks], number
        )
        self._share(engine.pool)
        logger.info("engine %r is attached", engine.name)
        return engine

    def _resumed(self, greeting: wire.Resume, arena: int) -> AttachedEngine:
        """The engine that is to be served on, which this service served no more, or a service
        before it."""
        blocks, number = greeting.blocks, greeting.ticket.client
        if not self._pools[blocks].has(arena):
            raise RefusalError(
                "engines that started while the service was away have other memory; allowed: to "
                "start this engine again, which then shares it"
            )
        engine = self._engines.get((blocks, number))
        if engine is None:
            raise RefusalError(f"no engine of number {number} uses the memory")
        return engine

    def _resume(self, engine: AttachedEngine, greeting: wire.Resume, process: Process) -> None:
        known = engine.resume(process, greeting, self._mates(engine))
        if known is not None:
            self._unwatch(known.pidfd)
            known.close()
            engine.processes.discard(known)
        logger.info("engine %r is attached again", engine.name)

    def _mates(self, engine: AttachedEngine) -> int:
        """How many engines use its pool."""
        return sum(each.pool is engine.pool for each in self._engines.values())

    def _named(self, ticket: wire.Ticket) -> AttachedEngine:
        for engine in self._engines.values():
            if engine.ticket is None:
                continue
            if secrets.compare_digest(engine.ticket.token, ticket.token):
                return engine
        raise RefusalError(
            "the ticket is of no engine that is attached; the engine must start again"
        )

    # Engines.

    def _serve(self, engine: AttachedEngine, process: Process) -> None:
        try:
            packet = wire.receive(process.connection, self._room)
            if not packet:
                self._leave(engine, process)
                return
            if process is not engine.scheduler:
                raise RefusalError("only the scheduler of an engine sends messages")
            for message in wire.read_service(packet):
                engine.handle(message)
        except BlockingIOError:
            return
        except Exception as error:  # noqa: BLE001 - the other engines are served on
            self._give_up(engine, process, error)

    def _turn(self, now: float) -> bool:
        """Do all that needs no message, each part under its own guard. Returns whether the next
        turn is to follow soon."""
        self._guard("operators got no answer", self._operators.serve)
        for pool in self.pools:
            what = "a pool could not be polled; its cache recovers"
            self._guard(what, partial(self._poll, pool))
        for engine in self.engines:
            if engine.scheduler is not None:
                self._guard_engine(engine, partial(engine.serve, now))
                self._guard_engine(engine, engine.send)
        if now - self._looked_at > _GONE_SECONDS:
            self._looked_at = now
            for engine in self.engines:
                self._guard_engine(engine, partial(engine.look, now))
                for process in list(engine.processes):
                    what = f"a process of engine {engine.name!r} has ended, and is not forgotten"
                    self._guard(what, partial(self._end_if_over, engine, process))
                what = f"engine {engine.name!r} cannot be forgotten yet"
                self._guard(what, partial(self._forget_if_gone, engine))
        self._guard("processes wait longer to be let in", partial(self._lobby.serve, now))
        pools = [
            self._guard("a pool does not say whether it works", partial(_is_busy, pool))
            for pool in self.pools
        ]
        engines = [self._guard_engine(each, partial(_is_busy, each)) for each in self.engines]
        return any(pools) or any(engines)

    def _guard(self, what: str, call: Callable[[], Result]) -> Result | None:
        """Do a part of a turn. After an error, which is logged as `what`, the others go on."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - as above
            self._log_error(what, error)
            return None

    def _guard_engine(self, engine: AttachedEngine, call: Callable[[], Result]) -> Result | None:
        """Do a part of a turn for one engine. An error ends its attachment."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - as above
            if engine.scheduler is None:
                self._log_error(f"engine {engine.name!r} has left something in its pool", error)
            else:
                self._give_up(engine, engine.scheduler, error)
            return None

    def _poll(self, pool: SharedPool) -> None:
        """See what has ended in a pool, and tell its engines what has changed."""
        changes = pool.poll()
        watching = [each for each in self.engines if each.pool is pool and each.is_watching]
        for message in pool.descriptions.messages(changes) if changes else ():
            for engine in watching:
                self._guard_engine(engine, partial(engine.tell, message))
        pool.untold = ()

    def _log_error(self, what: str, error: Exception) -> None:
        """Log an error that may come again and again."""
        now = time.monotonic()
        recent = {each: at for each, at in self._logged_at.items() if now - at <= _LOGGED_SECONDS}
        if what not in recent:
            recent[what] = now
            logger.error("%s: %r", what, error, exc_info=error)
        self._logged_at = recent

    def _give_up(self, engine: AttachedEngine, process: Process, error: Exception) -> None:
        """What an engine has sent is against the rules, or made a call of the cache fail; or it has
        ended without reading all."""
        if not isinstance(error, ConnectionError):
            logger.warning(
                "engine %r is not served any more: %s", engine.name, error or type(error).__name__
            )
        what = f"engine {engine.name!r} has left something in its pool"
        self._guard(what, partial(self._leave, engine, process))

    def _leave(self, engine: AttachedEngine, process: Process) -> None:
        """A connection has ended. What the process may write to waits for its end."""
        self._unwatch(process.connection)
        process.connection.close()
        engine.leave(process)

    def _ended(self) -> None:
        """A process has ended: the next turn looks at all."""
        self._looked_at = 0.0

    def _end_if_over(self, engine: AttachedEngine, process: Process) -> None:
        """Forget a process that has ended. After an error, the next look tries again."""
        if process.has_ended:
            # First: it would wake the loop again and again.
            self._unwatch(process.pidfd)
            self._unwatch(process.connection)
            engine.ended(process)

    def _forget_if_gone(self, engine: AttachedEngine) -> None:
        if engine.is_gone(time.monotonic()):
            self._forget(engine)
            logger.info("engine %r has ended", engine.name)

    def _forget(self, engine: AttachedEngine) -> None:
        engine.free()
        del self._engines[next(key for key, each in self._engines.items() if each is engine)]
        self._share(engine.pool)

    def _share(self, pool: SharedPool) -> None:
        mates = [each for each in self._engines.values() if each.pool is pool]
        for engine in mates:
            engine.share(None, len(mates))

    # Sockets.

    def _watch(self, file: socket.socket | int, call: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def _unwatch(self, file: socket.socket | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)


def _is_busy(part: SharedPool | AttachedEngine) -> bool:
    return part.busy


def _make_pool(config: CacheConfig, greeting: wire.Open) -> SharedPool:
    memory = PoolMemory.create(config, greeting.blocks)
    return SharedPool(config, greeting.model, greeting.blocks, memory)


def _resume_pool(config: CacheConfig, greeting: wire.Resume, fds: list[int]) -> SharedPool:
    """Go on with memory that a service before this one has left, for all its engines."""
    memory = PoolMemory.resume(greeting.blocks, greeting.slots, fds)
    return SharedPool(config, greeting.model, greeting.blocks, memory, begun=True)


def _close(made: Future[SharedPool]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().close(0.0)
