# SPDX-License-Identifier: Apache-2.0
"""What one engine's requests use and keep, as the service hears it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from flexkv.client import Hold
from flexkv.service import messages as wire
from flexkv.service.lobby import RefusalError
from flexkv.service.pool import SharedPool
from flexkv.service.pool_keys import Announcements
from flexkv.types.tenants import LARGEST_TENANT, NO_TENANT

_MOST_PROMPT = 1 << 20
"""Blocks of a prompt: more than any model's context in blocks of one token."""

_MOST_NAMES = 1 << 18
"""Requests, and pins, that an engine has not ended: more than any engine has at once."""

AboutUse: TypeAlias = (
    wire.RecordUse
    | wire.Touch
    | wire.Demote
    | wire.RequestEnded
    | wire.HoldBlocks
    | wire.UnholdBlocks
)


class EngineUses:
    """Uses and holds of one engine, by its number. Single-threaded."""

    def __init__(self, pool: SharedPool, number: int, announced: Announcements) -> None:
        self._pool = pool
        self._number = number
        self._announced = announced
        self._prompt: list[bytes] = []
        self._others: list[bytes] = []
        self._requests: set[str] = set()
        self._pins: set[str] = set()

    def handle(self, message: AboutUse, tenant: int) -> None:
        """Do what the engine says. `tenant` is that of the engine, for whom its requests count,
        whatever they name. Raises RefusalError if the message is against the rules, by a fault or
        by intent."""
        cache = self._pool.cache
        match message:
            case wire.RecordUse():
                self._record(message, tenant)
            case wire.Touch():
                cache.touch(message.keys)
            case wire.Demote():
                cache.demote(message.keys)
            case wire.RequestEnded():
                request = self._own(message.request_id)
                self._announced.end_request(request)
                cache.ended(request, message.output_tokens)
                self._requests.discard(request)
            case wire.HoldBlocks():
                owner = self._own(message.owner)
                if message.kind is Hold.PIN:
                    _note(self._pins, owner, "pins")
                cache.hold(message.kind, message.keys, owner, message.seconds)
            case wire.UnholdBlocks():
                owner = self._own(message.owner)
                cache.unhold(message.kind, owner, message.keys)
                if message.kind is Hold.PIN:
                    self._pins.discard(owner)

    def clear(self) -> None:
        """The engine has left."""
        for owner in self._pins:
            self._pool.cache.unhold(Hold.PIN, owner)
        for request in self._requests:
            self._pool.cache.ended(request, 0)
        for known in (self._pins, self._requests, self._prompt, self._others):
            known.clear()

    def _own(self, name: str) -> str:
        """Names of engines do not meet."""
        return f"{self._number} {name}"

    def _record(self, message: wire.RecordUse, tenant: int) -> None:
        for known, more in (self._prompt, message.prompt), (self._others, message.others):
            if len(known) + len(more) > _MOST_PROMPT:
                raise RefusalError(f"a prompt has more than {_MOST_PROMPT} blocks")
            known.extend(more)
        context = message.context
        if context is None:
            return
        if not NO_TENANT <= context.tenant <= LARGEST_TENANT:
            raise RefusalError(f"a request has the tenant {context.tenant}")
        prompt, self._prompt = self._prompt, []
        others, self._others = self._others, []
        self._pool.prompt_blocks += len(prompt)
        self._pool.found_blocks += min(message.found, len(prompt))
        request = ""
        if context.request_id:
            request = self._own(context.request_id)
            _note(self._requests, request, "requests")
        # A conversation has its name on whichever engine it goes on.
        named = replace(context, request_id=request, tenant=tenant or context.tenant)
        self._pool.cache.record(others or prompt[: message.found], named, prompt)
        if request and context.stores and not others:
            self._announced.begin_request(request, prompt[message.found :])


def _note(names: set[str], name: str, what: str) -> None:
    names.add(name)
    if len(names) > _MOST_NAMES:
        raise RefusalError(f"the engine has more than {_MOST_NAMES} {what} that have not ended")
