# SPDX-License-Identifier: Apache-2.0
"""What operators ask of the service, between two turns of its loop."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from flexkv.client import Reset
from flexkv.control.find_blocks import find_blocks
from flexkv.control.http_door import RefusedError
from flexkv.control.prompts import AllPlaces, PromptPlaces, PromptQuestion
from flexkv.control.removals import await_removals
from flexkv.figures.health_samples import ok_sample
from flexkv.service import messages as wire
from flexkv.service.attached import AttachedEngine
from flexkv.service.door import SilentLoopError, operator_door
from flexkv.service.pool import SharedPool
from flexkv.service.state import SOCKET, Cleared, PoolState, ServiceState, own_figures
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.settings import CacheConfig
from flexkv.types.changes import Medium
from flexkv.types.texts import printable
from flexkv.version import __version__

logger = logging.getLogger(__name__)

Told = TypeVar("Told")

_REMOVED = (
    "the sockets in its directory were removed or replaced: no engine can attach, and running ones "
    "keep what they have; start the service again"
)

_KEYS = 4096
"""Blocks that one turn of the loop looks up: about a millisecond. Not tuned."""


class Operators:
    """Owns the doors. Their threads call `state` and `clear`, which wait for the loop; all other
    methods are the loop's.

    Args:
        directory: the service's; borrowed.
        figures: a listening socket of the network for figures; owned. None for none.
        config: the service's settings.
        pools, engines: the service's; read in its loop.
        refused: of its lobby; likewise.
        wake: lets the loop begin a turn.

    Raises:
        ArenaError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: RuntimeDirectory,
        figures: socket.socket | None,
        config: CacheConfig,
        *,
        pools: Mapping[wire.PoolBlocks, SharedPool],
        engines: Mapping[tuple[wire.PoolBlocks, int], AttachedEngine],
        refused: Mapping[str, str],
        wake: Callable[[], None],
    ) -> None:
        self.config = config
        self._directory = directory
        self._has_said = False
        self._pools, self._engines, self._refused = pools, engines, refused
        self._wake = wake
        self._began = time.monotonic()
        self._guard = threading.Lock()
        self._asked: deque[Callable[[], None]] | None = deque()
        self._doors = [operator_door(directory.listen(SOCKET), self, figures_only=False)]
        if figures is not None:
            self._doors.append(operator_door(figures, self, figures_only=True))

    def state(self, seconds: float) -> ServiceState:
        """The state of the service, within `seconds`.

        Raises:
            SilentLoopError: the loop has not come to it.
        """
        state = self._ask(self._state, seconds)
        # In the asking thread: a file system that hangs stops no engine.
        is_shown = all(self._directory.shows(each) for each in (wire.SOCKET, SOCKET))
        if is_shown or self._asked is None:  # closed meanwhile
            return state
        if not self._has_said:
            self._has_said = True
            logger.error("%s", _REMOVED)
        return msgspec.structs.replace(state, troubles=(_REMOVED, *state.troubles))

    def clear(self, fingerprint: str | None, seconds: float) -> Cleared:
        """Drop the blocks of pools, in memory and on disk. Shared stores keep theirs. Returns once
        the drives keep that over a power failure; the loop goes on meanwhile.

        Args:
            fingerprint: of the pool; None for all.
            seconds: to wait for the loop.

        Raises:
            SilentLoopError: the loop has not come to it, and nothing is cleared.
            RefusedError: there is no such pool.
        """
        count, asked = self._ask(lambda: self._clear(fingerprint), seconds)
        return Cleared(count, await_removals(asked))

    def lookup(
        self, question: PromptQuestion, fingerprint: str | None, seconds: float
    ) -> AllPlaces:
        """Where pools have the blocks of a prompt. The loop looks up some at a time.

        Args:
            question: the prompt, by its hashes.
            fingerprint: of the pool; None for all.
            seconds: to wait for the loop each time.

        Raises:
            SilentLoopError: the loop has not come to it.
            RefusedError: there is no such pool, or the prompt has no hashes.
        """
        if not question.hashes:
            raise RefusedError(
                "the prompt has tokens, and a service knows no tokens; allowed: the engine's "
                "hashes of its blocks, or to ask an engine of the service"
            )
        chosen = self._ask(lambda: self._chosen(fingerprint), seconds)
        return tuple(self._places(blocks, question, seconds) for blocks in chosen)

    def serve(self) -> None:
        """Answer what was asked since the last turn."""
        asked = self._asked
        while asked:
            asked.popleft()()

    def close(self) -> None:
        """Answer no more. Idempotent."""
        with self._guard:
            self._asked = None
        for door in self._doors:
            door.close()
        self._doors.clear()
        self._directory.remove(SOCKET)

    def _ask(self, call: Callable[[], Told], seconds: float) -> Told:
        told: Future[Told] = Future()

        def answer() -> None:
            if not told.set_running_or_notify_cancel():
                return
            try:
                told.set_result(call())
            except Exception as error:  # noqa: BLE001 - it is the asking thread's
                told.set_exception(error)

        with self._guard:
            if self._asked is None:
                raise SilentLoopError
            self._asked.append(answer)
            self._wake()
        try:
            return told.result(seconds)
        except TimeoutError:
            if told.cancel():
                raise SilentLoopError from None
            return told.result()  # the loop is at it

    def _state(self) -> ServiceState:
        seconds = time.monotonic() - self._began
        pools = (self._state_of(blocks, pool) for blocks, pool in self._pools.items())
        refused = (
            f"refused an engine{model and f' of the model {model!r}'}, and let none in since: "
            f"{printable(reason)}"
            for model, reason in self._refused.items()
        )
        return ServiceState(__version__, seconds, tuple(pools), tuple(refused))

    def _state_of(self, blocks: wire.PoolBlocks, pool: SharedPool) -> PoolState:
        figures = pool.cache.figures()
        engines = tuple(each.state for each in self._engines_of(pool))
        own = own_figures(engines, pool.prompt_blocks, pool.found_blocks)
        values = own | figures.own | figures.shared
        values |= ok_sample(values)
        return PoolState(
            blocks.fingerprint,
            pool.model,
            blocks.identity,
            pool.num_slots,
            pool.cache.info.slot_bytes,
            pool.policy,
            {name: float(value) for name, value in values.items()},
            engines,
            pool.tenants,
        )

    def _clear(self, fingerprint: str | None) -> tuple[dict[str, int], list[Future[str]]]:
        pools = self._chosen(fingerprint)
        chosen = {blocks.fingerprint: pool for blocks, pool in pools.items()}
        count = {name: pool.cache.ready_blocks for name, pool in chosen.items()}
        for pool in chosen.values():
            for engine in self._engines_of(pool):
                engine.cleared()
            pool.cache.reset(Reset.EMPTY)
        logger.info("an operator cleared %d pools with %d blocks", len(count), sum(count.values()))
        return count, [asked for pool in chosen.values() for asked in pool.cache.sync()]

    def _chosen(self, fingerprint: str | None) -> dict[wire.PoolBlocks, SharedPool]:
        """The pool of a fingerprint; None for all."""
        chosen = {
            blocks: pool
            for blocks, pool in self._pools.items()
            if fingerprint in (None, blocks.fingerprint)
        }
        if fingerprint is not None and not chosen:
            known = ", ".join(each.fingerprint for each in self._pools) or "none yet"
            raise RefusedError(f"no pool has the fingerprint {fingerprint!r}; allowed: {known}")
        return chosen

    def _places(
        self, blocks: wire.PoolBlocks, question: PromptQuestion, seconds: float
    ) -> PromptPlaces:
        step = blocks.engine_blocks
        keys = [bytes.fromhex(each) for each in question.hashes[step - 1 :: step]]
        found = find_blocks(
            lambda part: self._ask(lambda: self._where(blocks, part), seconds),
            (keys[start : start + _KEYS] for start in range(0, len(keys), _KEYS)),
        )
        return PromptPlaces("", blocks.fingerprint, len(keys), found.blocks, None, found.tiers)

    def _where(
        self, blocks: wire.PoolBlocks, keys: Sequence[bytes]
    ) -> Mapping[Medium, Sequence[bool | None]]:
        pool = self._pools.get(blocks)
        if pool is None:
            raise RefusedError(f"the pool of {blocks.fingerprint} has ended; allowed: to ask again")
        return pool.cache.where(keys)

    def _engines_of(self, pool: SharedPool) -> list[AttachedEngine]:
        return [each for each in self._engines.values() if each.pool is pool]
