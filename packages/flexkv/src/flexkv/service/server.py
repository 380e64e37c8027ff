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
from contextlib import ExitStack
from typing import TypeGuard

from flexkv.service import messages as wire
from flexkv.service.attached import AttachedEngine, Process, RefusalError
from flexkv.service.engine_page import MOST_ENGINES
from flexkv.service.operators import Operators
from flexkv.service.pool import PoolMemory, SharedPool
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.settings import CacheConfig
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 0.001
"""Pause of the loop while a tier works. Not tuned."""
_IDLE_SECONDS = 0.05
"""Pause of the loop while nothing happens. Not tuned."""

_MEMORY_FDS = 3
"""Descriptors of memory that `messages.Resume` brings."""

_GREETING_SECONDS = 5.0
"""Seconds within which a peer must greet. Peers greet at once. Not tuned."""
_AWAITED_SECONDS = 10.0
"""Seconds after the start in which engines of the service before this one hand their memory back.
An engine that starts meanwhile waits: with memory of its own, it would not share with them. Not
tuned."""
_MOST_GUESTS = 256
"""Peers that have not greeted yet. Not tuned."""

_GONE_SECONDS = 1.0
"""Seconds between two looks whether engines have ended that a service before this one has left. Not
tuned."""

_LOGGED_SECONDS = 60.0
"""Seconds between two lines about errors of one kind. Not tuned."""


class NodeServer:
    """The service of one user on a node. Single-threaded; `run` returns after `stop`.

    Args:
        root: path of its runtime directory; created with mode 0700 if missing.
        config: settings: those of lower tiers, of eviction and of pins.
        memory_gb: host memory of each pool, in GiB; None for the default of `cpu_cache_gb`.
        figures: a listening socket at which its figures are served by HTTP; owned. None for none.

    Raises:
        ArenaError: the directory cannot be used, or a service of this user runs there.
    """

    def __init__(
        self,
        root: str,
        config: CacheConfig,
        memory_gb: float | None,
        figures: socket.socket | None = None,
    ) -> None:
        self._config = config
        self._memory_gb = memory_gb
        self._pools: dict[wire.PoolBlocks, SharedPool] = {}
        self._engines: dict[tuple[wire.PoolBlocks, int], AttachedEngine] = {}
        self._guests: dict[socket.socket, float] = {}
        self._selector = selectors.DefaultSelector()
        self._stops = self._is_closed = False
        self._logged_at = self._refused_at = -_LOGGED_SECONDS
        self._refused_for = ""
        self._looked_at = 0.0
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with ExitStack() as undo:
            self._directory = RuntimeDirectory(root, create=True)
            undo.callback(self._directory.close)
            if figures is not None:
                undo.callback(figures.close)
            self._listener = self._directory.listen(wire.SOCKET, socket.SOCK_SEQPACKET)
            undo.callback(self._listener.close)
            self._operators = Operators(
                self._directory,
                figures,
                config,
                pools=self._pools,
                engines=self._engines,
                wake=self._awake,
            )
            undo.pop_all()
        self._listener.setblocking(False)
        self._postponed: list[tuple[socket.socket, int, wire.Open]] = []
        self._awaits_until = 0.0
        try:
            if self._directory.is_held(wire.ENGINES):
                self._awaits_until = time.monotonic() + _AWAITED_SECONDS
        except OSError as error:
            logger.warning("cannot see whether engines wait for this service: %s", error)
        self._watch(self._listener, self._accept)
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
        while not self._stops:
            busy = any(pool.cache.busy for pool in self._pools.values())
            ready = self._selector.select(_BUSY_SECONDS if busy else _IDLE_SECONDS)
            now = time.monotonic()
            for key, _ in ready:
                try:
                    key.data()
                except Exception as error:  # noqa: BLE001 - the other engines are served on
                    self._log_error("a peer could not be served", error, now)
            self._turn(now)

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
        self._listener.close()
        self._directory.close()
        for engine in self._engines.values():
            engine.close()
        for pool in self._pools.values():
            pool.close(flush_seconds)
        for guest in self._guests:
            guest.close()
        for connection, pidfd, _ in self._postponed:
            connection.close()
            os.close(pidfd)
        self._selector.close()
        os.close(self._wake)
        woken, self._woken = self._woken, -1
        os.close(woken)

    # Greetings.

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            logger.warning("cannot accept a process: %s", error)
            return
        connection.setblocking(False)
        if len(self._guests) >= _MOST_GUESTS or not wire.is_same_user(connection):
            logger.warning("refused a process of another user, or one of too many")
            connection.close()
            return
        self._guests[connection] = time.monotonic()
        self._watch(connection, lambda: self._greet(connection))

    def _greet(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            packet, fds = wire.receive(connection)
            if not packet:
                self._dismiss(connection)  # another service asks whether this one lives
                return
            messages = wire.read_service(packet)
            resumes = isinstance(messages[0], wire.Resume) if messages else False
            if len(messages) != 1 or len(fds) != (1 + _MEMORY_FDS if resumes else 1):
                raise RefusalError("a greeting is one message with one pidfd, and memory to resume")
            self._forget_guest(connection)
            if self._must_wait(messages[0]):
                self._postponed.append((connection, fds.pop(0), messages[0]))
                return
            self._admit(connection, fds.pop(0), messages[0], fds)
        except Exception as error:  # noqa: BLE001 - whatever one peer causes is no end for others
            self._refuse(connection, error)
        finally:
            for fd in fds:
                os.close(fd)

    def _must_wait(self, greeting: wire.ToService) -> TypeGuard[wire.Open]:
        """Whether engines that live may bring the memory that this one asks for."""
        return (
            isinstance(greeting, wire.Open)
            and len(self._postponed) < _MOST_GUESTS
            and greeting.blocks not in self._pools
            and time.monotonic() < self._awaits_until
        )

    def _admit_postponed(self) -> None:
        """Let those in that have waited for memory which has come, or long enough."""
        waiting, self._postponed = self._postponed, []
        for connection, pidfd, greeting in waiting:
            if self._must_wait(greeting):
                self._postponed.append((connection, pidfd, greeting))
                continue
            try:
                self._admit(connection, pidfd, greeting, [])
            except Exception as error:  # noqa: BLE001 - as above
                self._refuse(connection, error)

    def _refuse(self, connection: socket.socket, error: Exception) -> None:
        self._log_refusal(str(error) or type(error).__name__)
        with contextlib.suppress(OSError):
            connection.sendall(wire.packets([wire.Refused(str(error))])[0])
        self._dismiss(connection)

    def _log_refusal(self, reason: str) -> None:
        """Log why a process was refused. Processes try again every second or so."""
        now = time.monotonic()
        if reason == self._refused_for and now - self._refused_at < _LOGGED_SECONDS:
            return
        self._refused_for, self._refused_at = reason, now
        logger.warning("refused a process: %s", reason)

    def _admit(
        self, connection: socket.socket, pidfd: int, greeting: wire.ToService, memory: list[int]
    ) -> None:
        """Let a process in, by its greeting, with descriptors of memory that it hands back. Owns
        `pidfd`, and those that it takes out of `memory`."""
        process = Process(connection, pidfd)
        made: AttachedEngine | None = None
        try:
            if not isinstance(greeting, wire.Open | wire.Join | wire.Schedule | wire.Resume):
                raise RefusalError(f"{type(greeting).__name__} is no greeting")
            if greeting.protocol != wire.PROTOCOL:
                raise RefusalError(
                    f"the engine speaks protocol {greeting.protocol}; allowed: {wire.PROTOCOL}, "
                    f"the same version of FlexKV as the service"
                )
            answer: wire.ToEngine
            lent: list[int] = []
            if isinstance(greeting, wire.Open):
                engine = made = self._open(greeting)
                spec = engine.pool.arena.spec
                assert engine.ticket is not None
                answer = wire.Opened(engine.ticket, spec.num_slots, spec.boards)
                lent = [engine.pool.arena.fd]
            elif isinstance(greeting, wire.Resume):
                engine = self._resume(greeting, process, memory)
                answer = wire.Resumed()
            else:
                engine = self._named(greeting.ticket)
                answer = wire.Joined()
                if isinstance(greeting, wire.Schedule):
                    lent = engine.schedule(process, greeting.step_blocks, self._mates(engine))
                    answer = wire.Scheduled(engine.pool.cache.info.media, engine.pool.policy)
            (packet,) = wire.packets([answer])
            try:
                socket.send_fds(connection, [packet], lent)
            except OSError:
                if not isinstance(greeting, wire.Resume):
                    raise
                # An engine that is served again, and has gone meanwhile, leaves as any other.
        except BaseException:
            os.close(pidfd)
            if made is not None:
                self._forget(made)
            raise
        engine.joined(process)
        self._watch(pidfd, lambda: self._ended(engine, process))
        self._watch(connection, lambda: self._serve(engine, process))

    def _open(self, greeting: wire.Open) -> AttachedEngine:
        blocks = greeting.blocks
        if blocks not in self._pools:
            memory = self._make_memory(blocks)
            self._pools[blocks] = SharedPool(self._config, blocks, memory)
            logger.info(
                "a pool of %d blocks for the models of fingerprint %s",
                self._pools[blocks].num_slots,
                blocks.fingerprint,
            )
        used = {number for each, number in self._engines if each == blocks}
        free = (number for number in range(1, MOST_ENGINES + 1) if number not in used)
        number = next(free, None)
        if number is None:
            raise RefusalError(f"the pool has {MOST_ENGINES} engines; allowed: no more")
        engine = AttachedEngine(greeting.engine, self._pools[blocks], number)
        self._engines[blocks, number] = engine
        self._share(engine.pool)
        logger.info("engine %r is attached", engine.name)
        return engine

    def _make_memory(self, blocks: wire.PoolBlocks) -> PoolMemory:
        """Memory for a new pool. If it is missing, pools without engines end, one after the
        other."""
        while True:
            try:
                return PoolMemory.create(self._config, blocks, self._memory_gb)
            except ArenaError:
                used = {each for each, _ in self._engines}
                idle = next((each for each in self._pools if each not in used), None)
                if idle is None:
                    raise
                logger.info("the pool of fingerprint %s ends for another", idle.fingerprint)
                self._pools.pop(idle).close(0.0)

    def _resume(self, greeting: wire.Resume, process: Process, memory: list[int]) -> AttachedEngine:
        """Serve an engine on, which this service served no more, or a service before it."""
        blocks, number = greeting.blocks, greeting.ticket.client
        if blocks not in self._pools:
            self._resume_pool(blocks, greeting.slots, memory)
        elif not self._pools[blocks].has(memory[0]):
            raise RefusalError(
                "engines that started while the service was away have other memory; allowed: to "
                "start this engine again, which then shares it"
            )
        engine = self._engines.get((blocks, number))
        if engine is None:
            raise RefusalError(f"no engine of number {number} uses the memory")
        known = engine.resume(process, greeting, self._mates(engine))
        if known is not None:
            self._unwatch(known.pidfd)
            known.close()
        logger.info("engine %r is attached again", engine.name)
        return engine

    def _resume_pool(self, blocks: wire.PoolBlocks, slots: int, memory: list[int]) -> None:
        """Go on with memory that a service before this one has left, for all its engines."""
        fds, memory[:] = memory[:], []
        taken = PoolMemory.resume(blocks, slots, fds)
        pool = self._pools[blocks] = SharedPool(self._config, blocks, taken, begun=True)
        for number in range(1, MOST_ENGINES + 1):
            if pool.is_used_by(number) or pool.cache.granted_to(number):
                name = f"number {number}"
                self._engines[blocks, number] = AttachedEngine(name, pool, number, begun=True)
        self._share(pool)
        logger.info(
            "a pool of %d blocks for the models of fingerprint %s goes on with %d blocks",
            slots,
            blocks.fingerprint,
            pool.cache.ready_blocks,
        )

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
            packet, fds = wire.receive(process.connection)
            for fd in fds:
                os.close(fd)
            if not packet:
                self._leave(engine, process)
                return
            if process is not engine.scheduler:
                raise RefusalError("only the scheduler of an engine sends messages")
            for message in wire.read_service(packet):
                engine.handle(message)
        except BlockingIOError:
            return
        except ConnectionError:  # it has ended without reading all
            self._leave(engine, process)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(engine, process, error)

    def _turn(self, now: float) -> None:
        self._operators.serve()
        for pool in self._pools.values():
            try:
                self._poll(pool)
            except Exception as error:  # noqa: BLE001 - the cache recovers, and others go on
                self._log_error("a pool could not be polled; its cache recovers", error, now)
        for engine in self._engines.values():
            scheduler = engine.scheduler
            if scheduler is None:
                continue
            try:
                engine.serve(now)
                engine.send()
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(engine, scheduler, error)
        if now - self._looked_at > _GONE_SECONDS:
            self._looked_at = now
            for engine in self.engines:
                self._forget_if_gone(engine)
        if self._postponed:
            self._admit_postponed()
        late = [each for each, since in self._guests.items() if now - since > _GREETING_SECONDS]
        for guest in late:
            self._dismiss(guest)

    def _poll(self, pool: SharedPool) -> None:
        """See what has ended in a pool, and tell its engines what has changed."""
        if pool.cache.busy:
            pool.cache.poll()
        pool.cache.look_at_holds()
        for change in pool.cache.drain_changes() if pool.cache.has_changes else ():
            self._tell_changes(pool, wire.Changed(change.medium, change.removed, change.added))

    def _log_error(self, what: str, error: Exception, now: float) -> None:
        """Log an error that may come again and again."""
        if now - self._logged_at > _LOGGED_SECONDS:
            self._logged_at = now
            logger.error("%s: %r", what, error, exc_info=error)

    def _give_up(self, engine: AttachedEngine, process: Process, error: Exception) -> None:
        """What an engine has sent is against the rules, or made a call of the cache fail."""
        logger.warning(
            "engine %r is not served any more: %s", engine.name, error or type(error).__name__
        )
        try:
            self._leave(engine, process)
        except Exception as another:  # noqa: BLE001 - as above
            logger.error("engine %r has left something in its pool: %r", engine.name, another)

    def _tell_changes(self, pool: SharedPool, change: wire.Changed) -> None:
        keys = wire.MOST_KEYS
        parts = [
            wire.Changed(change.medium, change.removed[start : start + keys], [])
            for start in range(0, len(change.removed), keys)
        ] + [
            wire.Changed(change.medium, [], change.added[start : start + keys])
            for start in range(0, len(change.added), keys)
        ]
        for engine in self._engines.values():
            if engine.pool is pool and engine.watches and not engine.has_ended:
                for part in parts:
                    engine.tell(part)

    def _leave(self, engine: AttachedEngine, process: Process) -> None:
        """A connection has ended. What the process may write to waits for its end."""
        self._unwatch(process.connection)
        process.connection.close()
        engine.leave(process)

    def _ended(self, engine: AttachedEngine, process: Process) -> None:
        """A process has ended, and its memory is unmapped."""
        self._unwatch(process.pidfd)
        if process.connection.fileno() >= 0:
            self._leave(engine, process)
        engine.ended(process)
        process.close()
        self._forget_if_gone(engine)

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

    def _forget_guest(self, connection: socket.socket) -> None:
        self._unwatch(connection)
        self._guests.pop(connection, None)

    def _dismiss(self, connection: socket.socket) -> None:
        self._forget_guest(connection)
        connection.close()
