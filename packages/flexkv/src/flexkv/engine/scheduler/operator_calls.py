# SPDX-License-Identifier: Apache-2.0
"""What operators have an engine's cache do, between two calls of its scheduler, which may be idle.

The scheduler never waits for longer than a turn: one call of the cache about a few hundred blocks.
A lookup only reads the cache, without a turn, a part of a prompt at a time, and lets the engine's
thread run between two parts.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from flexkv.client import CacheClient, FetchId, Hold
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.scheduler.hints import name_of
from flexkv.engine.scheduler.options import retaining, tenant_session
from flexkv.engine.scheduler.reports import Sessions, own_keys
from flexkv.eviction import RequestContext
from flexkv.figures.definitions import sample
from flexkv.operators import verbs
from flexkv.operators.answers import await_removals, find_blocks
from flexkv.operators.engine_door import EngineDoor, OperatorAccess
from flexkv.operators.verbs import (
    Answers,
    ClearEffect,
    ClearQuestion,
    PinQuestion,
    PromptEffect,
    PromptPlaces,
    PromptQuestion,
    RefusedError,
    SessionEffect,
    SessionQuestion,
    SilentError,
    Unpinned,
    UnpinQuestion,
)
from flexkv.types.changes import Medium

logger = logging.getLogger(__name__)

_TURN_SECONDS = 5.0
"""Seconds to wait for a turn: a step with long prompts may take some."""
_END_SECONDS = 60.0
"""Seconds to wait for the turn that ends a fetch, whose blocks would else stay."""
_PAUSE_SECONDS = 0.002
"""Pause between two turns, and between two attempts to get one."""
_PART_PAUSE_SECONDS = 0.0005
"""Pause between two parts of a prompt, in which the engine's thread gets the GIL at once."""
_WARM_SECONDS = 60.0
"""The longest that a warm waits for lower tiers."""
_REMOVE_SECONDS = 10.0
"""The longest that a removal waits for blocks that are being stored or written."""
_DEMOTE_SECONDS = 30.0
"""The longest that a demotion waits for the tiers that the blocks are written to."""
_PART = 64
"""Blocks of a conversation that a turn removes."""
_WARM_SHARE = 4
"""At most a quarter of host memory is warmed at once: the rest is that of running requests."""

_HOST_BLOCKS = sample("blocks", Medium.HOST.value)

_R = TypeVar("_R")


class OperatorCalls:
    """Answers operators. Threads of the engine's door call it. Changes wait for a turn, and raise
    SilentError if the scheduler has let none in, or RefusedError if a call has failed, which the
    log says. A reason says why not all was done, for people; it is empty if there is none.

    Args:
        cache: the engine's cache; borrowed.
        boundary: of the engine's calls, which hold `turn`. The functions are called with it held.
        may_begin: whether the scheduler is not between its lookup of a request and the load that
            follows. A block that it has found then must stay.
        poll: handles what has ended, as a step does.
        empty: calls `Reset.EMPTY` as the engine's side must, and returns whether that succeeded.
        others: returns, for keys of a conversation, those of further blocks of these tokens, which
            `Sessions` does not have.
    """

    def __init__(
        self,
        cache: CacheClient,
        boundary: ErrorBoundary,
        access: OperatorAccess,
        *,
        may_begin: Callable[[], bool],
        poll: Callable[[], None],
        sessions: Sessions,
        empty: Callable[[], bool],
        others: Callable[[Sequence[bytes]], Sequence[bytes]] = lambda keys: (),
    ) -> None:
        self._cache = cache
        self._boundary = boundary
        self._keys, self._http = access.keys, access.http
        self._may_begin = may_begin
        self._poll = poll
        self._sessions = sessions
        self._empty = empty
        self._others = others
        self._engine = self._fingerprint = ""
        self._releases = itertools.count()
        self._warming = threading.Lock()

    def open(self, root: str, engine: str, fingerprint: str) -> EngineDoor:
        """Answer by a door in the runtime directory `root`; the caller closes it."""
        self._engine, self._fingerprint = engine, fingerprint
        answers: Answers = {
            verbs.LOOKUP: lambda question: (self._find(question),),
            verbs.WARM: self._warm,
            verbs.DEMOTE: self._demote,
            verbs.PIN: self._pin,
            verbs.UNPIN: self._unpin,
            verbs.REMOVE: self._remove_prompt,
            verbs.RELEASE: self._release_session,
            verbs.REMOVE_SESSION: self._remove_session,
            verbs.CLEAR: self._clear,
        }
        poll = partial(self._turn, self._poll_busy) if self._cache.info.drops_old else None
        return EngineDoor(root, self._http, answers, poll)

    def _warm(self, question: PromptQuestion) -> PromptEffect:
        reason = "the cache has no lower tier"
        if self._cache.info.media:
            if not self._warming.acquire(blocking=False):
                raise RefusedError("the engine warms another prompt now; allowed: one at a time")
            try:
                reason = self._fetch(self._needed(question), time.monotonic() + _WARM_SECONDS)
            finally:
                self._warming.release()
        places = self._find(question)
        return PromptEffect(places, places.in_host, reason)

    def _demote(self, question: PromptQuestion) -> PromptEffect:
        before, reason = self._find(question), "the cache has no lower tier"
        if self._cache.info.media:
            reason = self._leave_host([*itertools.chain.from_iterable(self._needed(question))])
        places = self._find(question)
        return PromptEffect(places, max(0, before.in_host - places.in_host), reason)

    def _leave_host(self, keys: Sequence[bytes]) -> str:
        """Write blocks to lower tiers, and remove them from host memory. Returns a reason."""
        self._turn(partial(self._cache.demote, keys))
        late = time.monotonic() + _DEMOTE_SECONDS
        while left := self._turn(partial(self._demoting, keys)):
            goes_on = self._cache.info.is_shared or self._turn(lambda: self._cache.busy)
            if time.monotonic() > late or not goes_on:
                return (
                    f"{left} stay in host memory: lower tiers take no more, pins keep them, or "
                    "others need them"
                )
            time.sleep(_PAUSE_SECONDS)
        return ""

    def _pin(self, question: PinQuestion) -> PromptEffect:
        before, owner = self._turn(lambda: self._refused), _owner(question.name)
        for keys in self._needed(question):
            self._turn(partial(self._cache.hold, Hold.PIN, keys, owner, question.seconds))
        refused = self._turn(lambda: self._refused) - before
        places = self._find(question)
        reason = f"the limit of pinned blocks left out {refused}" if refused else ""
        return PromptEffect(places, max(0, places.in_host - refused), reason)

    def _unpin(self, question: UnpinQuestion) -> Unpinned:
        was_pinned = self._turn(partial(self._cache.unhold, Hold.PIN, _owner(question.name)))
        return Unpinned(question.name, was_pinned)

    def _remove_prompt(self, question: PromptQuestion) -> PromptEffect:
        before = self._find(question)
        every = itertools.chain(self._parts(question), self._keys.others(question))
        reason = _joined(*self._remove_all(every))
        places = self._find(question)
        return PromptEffect(places, max(0, before.found - places.found), reason)

    def _clear(self, question: ClearQuestion) -> ClearEffect:
        """Remove all blocks from host memory and from disks. Loads under way keep theirs until they
        end, and stores under way are not published."""
        self._refuse_shared()
        before = self._turn(self._clear_all)
        if before is None:
            raise RefusedError(
                "the cache is not cleared, and nothing is loaded or stored until it is; see the "
                "engine's log"
            )
        left = await_removals(self._turn(self._cache.sync))
        shared = f"{self._shared} keep theirs: `flexkv clear stores` clears them"
        reason = _joined(left, shared if self._shared else "")
        return ClearEffect(self._engine, self._fingerprint, before, reason)

    def _remove_session(self, question: SessionQuestion) -> SessionEffect:
        """Remove the blocks of a conversation that no other one has."""
        name = tenant_session(question.cache_salt, name_of(question.session))
        keys = own_keys(name, self._turn(self._sessions.known))
        whole = [*keys, *self._others(keys)]
        left, shared = self._remove_all(whole[i : i + _PART] for i in range(0, len(whole), _PART))
        if not left:  # else the command is run again
            self._turn(partial(self._sessions.forget, name))
        return SessionEffect(question.session, len(keys), _joined(left, shared))

    def _release_session(self, question: SessionQuestion) -> SessionEffect:
        """A conversation has ended: its blocks need not be retained, and those that no other one
        has may be evicted first, as the option `release` of a request says."""
        name = tenant_session(question.cache_salt, name_of(question.session))
        keys = self._turn(partial(self._sessions.keys_of, name))
        if keys:
            self._turn(partial(self._release, name, question.cache_salt, keys))
        return SessionEffect(question.session, len(keys))

    def _release(self, name: str, cache_salt: str, keys: Sequence[bytes]) -> None:
        self._cache.unhold(Hold.RETAIN, retaining(cache_salt), [*keys, *self._others(keys)])
        # The eviction policy learns it as from a request.
        request_id = f"operator {next(self._releases)}"
        context = RequestContext(request_id=request_id, session=name, returns=False)
        self._cache.record((), context, keys)
        self._cache.ended(request_id, 0)

    @property
    def _shared(self) -> str:
        """Names of the shared stores, for people."""
        return " and ".join(each.value for each in self._cache.info.media if each.is_shared)

    def _refuse_shared(self) -> None:
        if self._cache.info.is_shared:
            raise RefusedError(
                "the blocks are those of the node's service; allowed: `flexkv clear service`, "
                "which drops all blocks of the service"
            )

    def _clear_all(self) -> int | None:
        before = int(self._cache.figures().shared[_HOST_BLOCKS])
        if not self._empty():
            return None
        self._sessions.forget_all()
        logger.info("an operator cleared the cache, which had %d blocks in host memory", before)
        return before

    def _remove_all(self, parts: Iterable[Sequence[bytes]]) -> tuple[str, str]:
        """Remove blocks from host memory and from disks. Returns why some may stay on this machine,
        and why in shared stores."""
        self._refuse_shared()
        whole, late = list(parts), time.monotonic() + _REMOVE_SECONDS
        stay = f"{self._shared} keep theirs: a shared store drops no single blocks"
        shared = stay if self._shared else ""
        while left := sum(self._turn(partial(self._remove, keys)) for keys in whole):
            if time.monotonic() > late:
                return f"{left} are still being stored or written; run the command again", shared
            time.sleep(_PAUSE_SECONDS)
        return await_removals(self._turn(self._cache.sync)), shared

    def _remove(self, keys: Sequence[bytes]) -> int:
        self._poll_busy()
        return self._cache.remove(keys)

    def _demoting(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks host memory still has."""
        self._poll_busy()
        return len(keys) - len(self._cache.missing(keys))

    def _poll_busy(self) -> None:
        if self._cache.busy:
            self._poll()

    @property
    def _refused(self) -> int:
        return int(self._cache.figures().counts.get("refused_pins", 0))

    def _fetch(self, parts: Iterable[Sequence[bytes]], late: float) -> str:
        most = self._cache.info.num_slots // _WARM_SHARE
        fetch: FetchId | None = None
        taken, reason = 0, ""
        try:
            for part in parts:
                keys = part[: most - taken]
                taken += len(keys)
                if fetch is None:
                    fetch, goes_on = self._turn(partial(self._begin, keys))
                else:
                    goes_on = self._turn(partial(self._cache.extend_fetch, fetch, keys))
                if goes_on and len(keys) < len(part):
                    reason = f"a quarter of host memory, {most} blocks, is warmed at once"
                if not goes_on or reason:
                    break
            while fetch is not None and not self._turn(partial(self._advance, fetch)):
                if time.monotonic() > late:
                    return "the time is over; what has come stays"
                time.sleep(_PAUSE_SECONDS)
        finally:
            if fetch is not None:
                self._turn(partial(self._cache.end_fetch, fetch), _END_SECONDS)
        return reason

    def _begin(self, keys: Sequence[bytes]) -> tuple[FetchId | None, bool]:
        """Begin a fetch. Returns also whether blocks behind these can be of use."""
        fetch = self._cache.fetch(keys, queued=True)
        return fetch, fetch is not None or self._cache.lookup(keys) == len(keys)

    def _advance(self, fetch: FetchId) -> bool:
        """Handle what has come. Returns whether the fetch has ended."""
        self._poll_busy()
        return self._cache.fetch_state(fetch).done

    def _find(self, question: PromptQuestion) -> PromptPlaces:
        found = find_blocks(self._cache.where, self._parts(question))
        return PromptPlaces(
            self._engine,
            self._fingerprint,
            self._keys.count(question),
            found.blocks,
            self._keys.block_tokens,
            found.tiers,
        )

    def _parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        for part in self._keys.parts(question):
            yield part
            time.sleep(_PART_PAUSE_SECONDS)

    def _needed(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        """The keys of all blocks that a hit of the prompt needs, as far as tiers have it. A part of
        the blocks of other groups has no gap where a block is nowhere, as some are never stored."""
        yield from self._parts(question)
        places = self._find(question)
        is_sure = all(each.is_sure for each in places.tiers)
        for keys in self._keys.others(question, places.found if is_sure else places.blocks):
            has = zip(*self._cache.where(keys).values(), strict=True)
            there = [any(each is not False for each in tiers) for tiers in has]
            yield list(itertools.compress(keys, there))

    def _turn(self, call: Callable[[], _R], seconds: float | None = None) -> _R:
        seconds = _TURN_SECONDS if seconds is None else seconds
        late = time.monotonic() + seconds
        while True:
            with self._boundary.turn:
                if self._may_begin():
                    with self._boundary.guard("an operator's call", "it is refused"):
                        return call()
                    raise RefusedError("the call has failed; see the engine's log")
            if time.monotonic() > late:
                raise SilentError(
                    f"the engine's scheduler has let no other call in for {seconds:g} s"
                )
            time.sleep(_PAUSE_SECONDS)


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _owner(name: str) -> tuple[str, str]:
    return "operator", name
