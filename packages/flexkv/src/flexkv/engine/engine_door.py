# SPDX-License-Identifier: Apache-2.0
"""An engine's door for operators, on a socket of the runtime directory.

    POST /lookup    `PromptQuestion`; `AllPlaces`
    POST /warm      `PromptQuestion`; `PromptEffect`
    POST /demote    `PromptQuestion`; `PromptEffect`
    POST /pin       `PinQuestion`; `PromptEffect`
    POST /unpin     `UnpinQuestion`; `Unpinned`
    POST /remove    `PromptQuestion`; `PromptEffect`
    POST /release, /remove_session    `SessionQuestion`; `SessionEffect`
    POST /clear     `ClearQuestion`; `ClearEffect`

On a port of this machine it answers the same, and GET /openapi.json, to those who know a token.

Threads of the door answer, also while the engine is idle. A lookup only reads the cache, a part of
a prompt at a time, and lets the engine's thread run between two parts. The others change the cache
between two calls of the engine.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from typing import Protocol

import msgspec

from flexkv.client import CacheClient
from flexkv.control.find_blocks import find_blocks
from flexkv.control.http_door import JSON, Answer, Door, DoorRequest, Routes, listen_at
from flexkv.control.local_http import HOST, LocalHttp, local_http
from flexkv.control.openapi import describe
from flexkv.control.prompts import (
    ClearEffect,
    PromptEffect,
    PromptPlaces,
    PromptQuestion,
    SessionEffect,
    Unpinned,
    read_clear,
    read_pin,
    read_question,
    read_session,
    read_unpin,
)
from flexkv.engine.idle_polls import IdlePolls
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.settings import CacheConfig
from flexkv.system.forks import close_in_children
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

PART_BLOCKS = 64
"""Blocks of a part: their hashes take vLLM 0.3 ms. Not tuned."""

WARM_SECONDS = 60.0
"""The longest that a warm waits for lower tiers. Not tuned."""

_PAUSE_SECONDS = 0.0005
"""Pause between two parts, in which the engine's thread gets the GIL at once. Not tuned."""


class PromptKeys(Protocol):
    """Makes the keys of a prompt that is no request. Any thread may call it.

    Attributes:
        block_tokens: tokens of a block.
    """

    @property
    def block_tokens(self) -> int: ...

    def count(self, question: PromptQuestion) -> int:
        """The number of whole blocks of a prompt."""
        ...

    def parts(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        """The keys of these blocks, in order, about `PART_BLOCKS` at a time."""
        ...

    def others(
        self, question: PromptQuestion, blocks: int | None = None
    ) -> Iterator[Sequence[bytes]]:
        """The keys of blocks that a hit needs besides: those of the model's other KV cache groups.

        Args:
            question: the prompt.
            blocks: whole blocks of the hit; None for all blocks of the prompt in these groups.
        """
        ...


class CacheCalls(Protocol):
    """Changes an engine's cache; see `flexkv.engine.scheduler.operator_calls`."""

    def warm(self, parts: Iterable[Sequence[bytes]], seconds: float) -> str:
        """Bring the blocks of a prefix into host memory. Returns why not all; empty for none."""
        ...

    def demote(self, parts: Iterable[Sequence[bytes]]) -> str:
        """Move the blocks of a prefix to lower tiers. Returns why not all; empty for none."""
        ...

    def poll(self) -> None:
        """See `flexkv.engine.idle_polls.PolledCache.poll`."""
        ...

    def pin(self, parts: Iterable[Sequence[bytes]], name: str, seconds: float | None) -> int:
        """Pin the blocks of a prefix. Returns how many the limit left out."""
        ...

    def unpin(self, name: str) -> bool:
        """End the pins of a name. Returns whether there are any."""
        ...

    def remove(self, parts: Iterable[Sequence[bytes]]) -> str:
        """Remove the blocks of a prefix. Returns why some may stay; empty for none."""
        ...

    def release_session(self, session: str, cache_salt: str) -> int:
        """A conversation has ended. Returns how many blocks it has."""
        ...

    def remove_session(self, session: str, cache_salt: str) -> tuple[int, str]:
        """Remove the own blocks of a conversation. Returns their number, and why some may stay."""
        ...

    def clear(self) -> tuple[int, str]:
        """Remove all blocks. Returns how many host memory had, and why some may stay."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """How operators reach an engine's cache.

    Attributes:
        keys: makes the keys of prompts that are no requests.
        calls: changes the cache; None for lookups only.
        http: a port of this machine at which they ask, too; None for none.
    """

    keys: PromptKeys
    calls: CacheCalls | None = None
    http: LocalHttp | None = None

    @classmethod
    def of(cls, config: CacheConfig, keys: PromptKeys) -> OperatorAccess:
        """Lookups only, by a port if the settings name one.

        Raises:
            ConfigError: see `local_http`.
        """
        return cls(keys, http=local_http(config))

    def changing(self, calls: CacheCalls) -> OperatorAccess:
        """The same with calls that change the cache."""
        return replace(self, calls=calls)


class EngineDoor:
    """The door of one engine. Closes with the engine.

    Args:
        root: path of the runtime directory.
        engine: name of the engine.
        fingerprint: of its blocks.
        cache: the engine's cache; borrowed until `close`.
        access: how operators reach it.

    Attributes:
        name: of the socket; empty if it could not be opened, which is logged. The engine works
            without it.
    """

    def __init__(
        self,
        root: str,
        engine: str,
        fingerprint: str,
        *,
        cache: CacheClient,
        access: OperatorAccess,
    ) -> None:
        self._engine, self._fingerprint = engine, fingerprint
        self._cache, self._keys, self._calls = cache, access.keys, access.calls
        self._root = root
        calls = access.calls
        self._polls = IdlePolls(calls) if calls is not None and cache.info.drops_old else None
        self._door: Door | None = None
        self._port = None if access.http is None else self._open_port(access.http)
        self.name = ""
        name = f"flexkv engine {secrets.token_hex(8)}"
        try:
            with RuntimeDirectory(root, create=True) as directory:
                listener = directory.listen(name)
        except (OSError, ArenaError) as error:
            logger.warning("this engine has no door for flexkv lookup: %s", error)
            return
        self._door = Door(listener, self._routes(), is_open=False)
        self.name = name
        close_in_children(self._door)

    def close(self) -> None:
        """Answer no more. Idempotent."""
        if self._polls is not None:
            self._polls.close()
        port, self._port = self._port, None
        if port is not None:
            port.close()
        door, self._door = self._door, None
        if door is None:
            return
        try:
            with RuntimeDirectory(self._root) as directory:
                directory.remove(self.name)
        except (OSError, ArenaError) as error:
            logger.debug("the socket of the engine's door stays: %s", error)
        door.close()

    def _open_port(self, http: LocalHttp) -> Door | None:
        routes = self._routes()
        described = msgspec.json.encode(describe(frozenset(path for _, path in routes)))
        try:
            listener = listen_at(HOST, http.port)
        except OSError as error:
            logger.warning(
                "control_port %d cannot be used (%s); this engine answers operators by its socket "
                "only; choose another port for it",
                http.port,
                os.strerror(error.errno or 0),
            )
            return None

        def openapi(_: DoorRequest) -> tuple[bytes, str]:
            return described, JSON

        shown = {("GET", "/openapi.json"): openapi, **routes}
        door = Door(listener, shown, is_open=True, token=http.token)
        close_in_children(door)
        logger.info("operators can ask this engine at http://%s:%d", HOST, http.port)
        return door

    def _routes(self) -> Routes:
        routes: dict[tuple[str, str], Answer] = {("POST", "/lookup"): self._lookup}
        calls = self._calls
        if calls is None:
            return routes
        routes |= {
            ("POST", "/warm"): partial(self._warm, calls),
            ("POST", "/demote"): partial(self._demote, calls),
            ("POST", "/pin"): partial(self._pin, calls),
            ("POST", "/unpin"): partial(self._unpin, calls),
            ("POST", "/remove"): partial(self._remove, calls),
            ("POST", "/release"): partial(self._release, calls),
            ("POST", "/remove_session"): partial(self._remove_session, calls),
            ("POST", "/clear"): partial(self._clear, calls),
        }
        return routes

    def _lookup(self, asked: DoorRequest) -> tuple[bytes, str]:
        places = self._find(read_question(asked.body))
        return msgspec.json.encode([places]), JSON

    def _warm(self, calls: CacheCalls, asked: DoorRequest) -> tuple[bytes, str]:
        question = read_question(asked.body)
        reason = calls.warm(self._needed(question), WARM_SECONDS)
        places = self._find(question)
        return msgspec.json.encode(PromptEffect(places, _in_host(places), reason)), JSON

    def _demote(self, calls: CacheCalls, asked: DoorRequest) -> tuple[bytes, str]:
        question = read_question(asked.body)
        before = self._find(question)
        reason = calls.demote(self._needed(question))
        places = self._find(question)
        done = max(0, _in_host(before) - _in_host(places))
        return msgspec.json.encode(PromptEffect(places, done, reason)), JSON

    def _pin(self, calls: CacheCalls, asked: DoorRequest) -> tuple[bytes, str]:
        question = read_pin(asked.body)
        refused = calls.pin(self._needed(question), question.name, question.seconds)
        places = self._find(question)
        reason = f"the limit of pinned blocks left out {refused}" if refused else ""
        done = max(0, _in_host(places) - refused)
        return msgspec.json.encode(PromptEffect(places, done, reason)), JSON

    def _unpin(self, calls: CacheCalls, asked: DoorRequest) -> tuple[bytes, str]:
        name = read_unpin(asked.body).name
        return msgspec.json.encode(Unpinned(name, calls.unpin(name))), JSON

    def _remove(self, calls: CacheCalls, asked: DoorRequest) -> tuple[bytes, str]:
        question = read_question(asked.body)
        before = self._find(question)
        reason = calls.remove(chain(self._parts(question), self._keys.others(question)))
        places = self._find(question)
        done = max(0, before.found - places.found)
        return msgspec.json.encode(PromptEffect(places, done, reason)), JSON

    def _release(self, calls: CacheCalls, asked: DoorRequest) -> tuple[bytes, str]:
        question = read_session(asked.body)
        blocks = calls.release_session(question.session, question.cache_salt)
        return msgspec.json.encode(SessionEffect(question.session, blocks)), JSON

    def _remove_session(self, calls: CacheCalls, asked: DoorRequest) -> tuple[bytes, str]:
        question = read_session(asked.body)
        done = calls.remove_session(question.session, question.cache_salt)
        return msgspec.json.encode(SessionEffect(question.session, *done)), JSON

    def _clear(self, calls: CacheCalls, asked: DoorRequest) -> tuple[bytes, str]:
        read_clear(asked.body)
        effect = ClearEffect(self._engine, self._fingerprint, *calls.clear())
        return msgspec.json.encode(effect), JSON

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
            time.sleep(_PAUSE_SECONDS)

    def _needed(self, question: PromptQuestion) -> Iterator[Sequence[bytes]]:
        """The keys of all blocks that a hit of the prompt needs, as far as tiers have it. A part of
        the blocks of other groups has no gap where a block is nowhere, as some are never stored."""
        yield from self._parts(question)
        places = self._find(question)
        is_sure = all(each.is_sure for each in places.tiers)
        for keys in self._keys.others(question, places.found if is_sure else places.blocks):
            has = zip(*self._cache.where(keys).values(), strict=True)
            there = [any(each is not False for each in tiers) for tiers in has]
            yield list(compress(keys, there))


def _in_host(places: PromptPlaces) -> int:
    """How many of the found blocks host memory has; a prompt without a whole block has none."""
    return places.tiers[0].blocks if places.tiers else 0
