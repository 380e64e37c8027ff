# SPDX-License-Identifier: Apache-2.0
"""Reports an engine's requests to the eviction policy, the recording and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flexkv.client import CacheClient, Hold
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.options import (
    NONE,
    RequestOptions,
    context_of,
    pin_owner,
    session_of,
    tenant_of,
)
from flexkv.engine.scheduler.request import HitTokens, Match, TrackedRequest
from flexkv.engine.side_figures import CacheFigures

_MOST_KEYS = 1 << 17
"""The most keys that are kept, about 14 MB; the conversations not heard of for longest are
forgotten first."""


class Sessions:
    """The keys of each conversation, as its latest request has shown them. Single-threaded."""

    def __init__(self) -> None:
        self._keys: dict[str, Sequence[bytes]] = {}  # the one heard of last is last
        self._count = 0

    def note(self, session: str, keys: Sequence[bytes]) -> None:
        """A conversation has these blocks now. `session`: its name among those of all tenants."""
        self.forget(session)
        self._keys[session] = keys[:]  # packed keys share their memory
        self._count += len(keys)
        while self._count > _MOST_KEYS:
            self.forget(next(iter(self._keys)))

    def keys_of(self, session: str) -> Sequence[bytes]:
        """The keys of a conversation, first block first; empty if it is unknown."""
        return self._keys.get(session, ())

    def known(self) -> dict[str, Sequence[bytes]]:
        """The keys of all conversations."""
        return dict(self._keys)

    def forget(self, session: str) -> None:
        """Forget a conversation."""
        self._count -= len(self._keys.pop(session, ()))

    def forget_all(self) -> None:
        """Forget all conversations, but those of running requests are known again at their end."""
        self._keys.clear()
        self._count = 0


def own_keys(session: str, known: dict[str, Sequence[bytes]]) -> list[bytes]:
    """The keys of a conversation that no other one has."""
    others = {key for name, keys in known.items() if name != session for key in keys}
    return [key for key in known.get(session, ()) if key not in others]


class HitReports:
    """Reports each request when the engine gives it blocks, and when it ends. With `keeps_others`,
    the keys of a conversation include those in other groups."""

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        figures: CacheFigures,
        recorder: Recorder | None,
        block_tokens: int,
        *,
        keeps_others: bool = True,
    ) -> None:
        self._cache = cache
        self._chooser = chooser
        self.figures = figures
        self._recorder = recorder
        self._block_tokens = block_tokens
        self._keeps_others = keeps_others
        self.sessions = Sessions()

    def queued(self, request: EngineRequest, options: RequestOptions) -> None:
        """A request is known from now on."""
        if options.unpin:
            self._cache.unhold(Hold.PIN, pin_owner(request, options))

    def allocated(
        self,
        request: EngineRequest,
        options: RequestOptions,
        match: Match,
        tokens: int,
        *,
        keys: tuple[Sequence[bytes], Sequence[bytes]],
        fetched: HitTokens | None,
        others: Callable[[], Sequence[bytes]] = tuple,
    ) -> None:
        """The engine has given blocks to a request.

        Args:
            tokens: tokens to load behind those that the engine has itself.
            keys: keys of the blocks that the hit uses, the engine's own included, and of all blocks
                of the prompt.
            fetched: tokens of the load that came from lower tiers; None if the request may not
                load.
            others: returns the keys of the prompt's blocks in other groups; only a conversation
                needs them.
        """
        hit_tokens = match.local_tokens + tokens
        context = context_of(request, options, hit_tokens)
        used, prompt = keys
        self._cache.record(used, context, prompt)
        if context.session:
            known = _with(prompt, others()) if self._keeps_others else prompt
            self.sessions.note(context.session, known)
        if self._recorder is not None:
            own, length = match.local_tokens, request.num_prompt_tokens
            self._recorder.scheduled(request.request_id, length, own, tokens, context.session)
        if fetched is not None:
            self.figures.asked(request.num_tokens - match.local_tokens, tokens, fetched)
        if tokens:
            blocks = -(-tokens // self._block_tokens)
            self.figures.hit(blocks, Span(match.local_tokens, hit_tokens))
        for reason, left in match.left:
            self.figures.left(reason, left)
            self._chooser.left(reason)

    def ended(
        self,
        request: EngineRequest,
        keys: Callable[[], Sequence[bytes]],
        others: Callable[[], Sequence[bytes]] = tuple,
        options: RequestOptions = NONE,
    ) -> None:
        """A request has ended.

        Args:
            keys: returns the keys of its complete blocks in the group that reaches furthest back.
                It and `others` are called only if a recording, a conversation or an option needs
                them.
            others: returns those in other groups.
        """
        output = request.num_tokens - request.num_prompt_tokens
        self._cache.ended(request.request_id, output)
        session = session_of(request, options) if options.session else ""
        leaves = options.release or options.demote
        if self._recorder is None and not session and not leaves:
            return
        names = keys()
        if self._recorder is not None:
            self._recorder.ended(request.request_id, output, len(names), lambda: names)
        own = _with(names, others()) if leaves or (session and self._keeps_others) else names
        if session:
            self.sessions.note(session, own if self._keeps_others else names)
        if options.release:
            self._cache.unhold(Hold.RETAIN, tenant_of(request), own)
        if options.demote:
            self._cache.demote(own)

    def close(self) -> None:
        """Close the recorder."""
        if self._recorder is not None:
            self._recorder.close()


def _with(keys: Sequence[bytes], others: Sequence[bytes]) -> Sequence[bytes]:
    return [*keys, *others] if others else keys


def spans_of(
    scheduled: Mapping[str, int], requests: Mapping[str, TrackedRequest]
) -> Sequence[Span]:
    """The tokens that a step computes of each request."""
    spans = []
    for request_id, count in scheduled.items():
        tracked = requests.get(request_id)
        if tracked is not None:
            start = tracked.request.num_computed_tokens
            spans.append(Span(start, start + count))
    return spans
