# SPDX-License-Identifier: Apache-2.0
"""Reports an engine's requests to the eviction policy, the recording and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flexkv.client import CacheClient, Hold
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.choice.cost import Span
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.options import NONE, RequestOptions, context_of, tenant_of
from flexkv.engine.scheduler.request import HitTokens, Match, TrackedRequest
from flexkv.engine.side_figures import CacheFigures

_MOST_KEYS = 1 << 17
"""The most keys that are kept, about 14 MB; the conversations not heard of for longest are
forgotten first."""
_MOST_RUNNING = 1 << 12
"""The most requests whose end is awaited."""


class Sessions:
    """The keys of each conversation, as its latest request has shown them. Single-threaded."""

    def __init__(self) -> None:
        self._keys: dict[str, Sequence[bytes]] = {}  # the one heard of last is last
        self._count = 0
        self._running: dict[str, str] = {}

    def began(self, request_id: str, session: str, keys: Sequence[bytes]) -> None:
        """A request of a conversation has begun.

        Args:
            session: name of the conversation among those of all tenants; empty if it has none.
        """
        if not session:
            return
        self._note(session, keys)
        self._running[request_id] = session
        if len(self._running) > _MOST_RUNNING:
            del self._running[next(iter(self._running))]

    def follows(self, request_id: str) -> bool:
        """Whether `ended` needs the keys of this request."""
        return request_id in self._running

    def ended(self, request_id: str, keys: Sequence[bytes]) -> None:
        """A request has ended with these blocks, those of its answer included."""
        session = self._running.pop(request_id, None)
        if session is not None:
            self._note(session, keys)

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

    def _note(self, session: str, keys: Sequence[bytes]) -> None:
        self.forget(session)
        self._keys[session] = keys[:]  # packed keys share their memory
        self._count += len(keys)
        while self._count > _MOST_KEYS:
            self.forget(next(iter(self._keys)))


def own_keys(session: str, known: dict[str, Sequence[bytes]]) -> list[bytes]:
    """The keys of a conversation that no other one has."""
    others = {key for name, keys in known.items() if name != session for key in keys}
    return [key for key in known.get(session, ()) if key not in others]


class HitReports:
    """Reports each request when the engine gives it blocks, and when it ends."""

    def __init__(
        self,
        cache: CacheClient,
        chooser: LoadChooser,
        figures: CacheFigures,
        recorder: Recorder | None,
        block_tokens: int,
    ) -> None:
        self._cache = cache
        self._chooser = chooser
        self.figures = figures
        self._recorder = recorder
        self._block_tokens = block_tokens
        self.sessions = Sessions()

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
            self.sessions.began(request.request_id, context.session, _with(prompt, others()))
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
            keys: returns the keys of its complete blocks in the group that reaches furthest back;
                only a recording and a conversation need them.
            others: returns those in other groups; only a conversation needs them.
        """
        if options.release or options.demote:
            own = _with(keys(), others())
            if options.release:
                self._cache.unhold(Hold.RETAIN, tenant_of(request), own)
            if options.demote:
                self._cache.demote(own)
        output = request.num_tokens - request.num_prompt_tokens
        self._cache.ended(request.request_id, output)
        follows = self.sessions.follows(request.request_id)
        names = keys() if follows or self._recorder is not None else ()
        if follows:
            self.sessions.ended(request.request_id, _with(names, others()))
        if self._recorder is not None:
            self._recorder.ended(request.request_id, output, len(names), lambda: names)

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
