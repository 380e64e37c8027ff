# SPDX-License-Identifier: Apache-2.0
"""An engine's door for operators, on a socket of the runtime directory.

    POST /lookup    `PromptQuestion`; `AllPlaces`

Threads of the door answer, also while the engine is idle. They only read the cache, a part of a
prompt at a time, and let the engine's thread run between two parts.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from flexkv.client import CacheClient
from flexkv.control.find_blocks import find_blocks
from flexkv.control.http_door import JSON, Door, DoorRequest
from flexkv.control.prompts import PromptPlaces, PromptQuestion, read_question
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.system.forks import close_in_children
from flexkv.types.errors import ArenaError

logger = logging.getLogger(__name__)

PART_BLOCKS = 64
"""Blocks of a part: their hashes take vLLM 0.3 ms. Not tuned."""

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


class EngineDoor:
    """The door of one engine. Closes with the engine.

    Args:
        root: path of the runtime directory.
        engine: name of the engine.
        fingerprint: of its blocks.
        cache: the engine's cache; borrowed until `close`.
        keys: makes its keys.

    Attributes:
        name: of the socket; empty if it could not be opened, which is logged. The engine works
            without it.
    """

    def __init__(
        self, root: str, engine: str, fingerprint: str, cache: CacheClient, keys: PromptKeys
    ) -> None:
        self._engine, self._fingerprint = engine, fingerprint
        self._cache, self._keys = cache, keys
        self._root = root
        self._door: Door | None = None
        self.name = ""
        name = f"flexkv engine {secrets.token_hex(8)}"
        try:
            with RuntimeDirectory(root, create=True) as directory:
                listener = directory.listen(name)
        except (OSError, ArenaError) as error:
            logger.warning("this engine has no door for flexkv lookup: %s", error)
            return
        self._door = Door(listener, {("POST", "/lookup"): self._lookup}, is_open=False)
        self.name = name
        close_in_children(self._door)

    def close(self) -> None:
        """Answer no more. Idempotent."""
        door, self._door = self._door, None
        if door is None:
            return
        try:
            with RuntimeDirectory(self._root) as directory:
                directory.remove(self.name)
        except (OSError, ArenaError) as error:
            logger.debug("the socket of the engine's door stays: %s", error)
        door.close()

    def _lookup(self, asked: DoorRequest) -> tuple[bytes, str]:
        question = read_question(asked.body)
        found = find_blocks(self._cache.where, _with_pauses(self._keys.parts(question)))
        places = PromptPlaces(
            self._engine,
            os.getpid(),
            self._fingerprint,
            self._keys.count(question),
            found.blocks,
            self._keys.block_tokens,
            found.tiers,
        )
        return msgspec.json.encode([places]), JSON


def _with_pauses(parts: Iterator[Sequence[bytes]]) -> Iterator[Sequence[bytes]]:
    for part in parts:
        yield part
        time.sleep(_PAUSE_SECONDS)
