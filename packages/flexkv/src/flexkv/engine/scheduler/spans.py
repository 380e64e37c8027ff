# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of what FlexKV did for a request, beside the engine's own spans of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from flexkv.client import Ended, FetchState
from flexkv.engine.scheduler.engine import EngineRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

logger = logging.getLogger("flexkv")

REQUEST_ID = "gen_ai.request.id"
"""The attribute in which the engines' own spans have the request's id."""

ContextOf = Callable[[EngineRequest], "Context | None"]
"""Returns the context that the spans of a request belong to, an empty one for a trace of their own;
None if the request has no spans."""

_MOST = 4096
"""Transfers that are followed at once; beyond it the oldest has no span."""


def make_spans(make_context_of: Callable[[], ContextOf]) -> OtelSpans | None:
    """What makes spans. They go where the engine has this process send its own. None without
    OpenTelemetry, which the engine's own spans need, too."""
    try:
        from opentelemetry import trace

        context_of = make_context_of()
    except ImportError as error:
        logger.warning("FlexKV makes no spans of requests: %s", error)
        return None
    return OtelSpans(trace.get_tracer("flexkv"), context_of)


class OtelSpans:
    """Makes spans by `tracer`, which hands them to a thread of its own. No call waits or raises."""

    def __init__(self, tracer: Tracer, context_of: ContextOf) -> None:
        self._tracer = tracer
        self._context_of = context_of
        self._has_failed = False

    def add(
        self, request: EngineRequest, name: str, begun: float, attributes: Mapping[str, int | bool]
    ) -> None:
        """Something has ended now that was done for a request.

        Args:
            name: `fetch`, `load` or `store`.
            begun: when it began; time.monotonic(), in seconds.
            attributes: numbers of blocks, and whether it is done.
        """
        try:
            self._add(request, name, begun, attributes)
        except Exception as error:  # noqa: BLE001 - a span is worth no request
            if not self._has_failed:
                logger.error("a span of a request was not made (logged once): %r", error)
            self._has_failed = True

    def add_fetch(self, request: EngineRequest, state: FetchState) -> None:
        """A fetch of a request has ended, with this last state."""
        if state.length:
            came = {f"{medium.value}_blocks": n for medium, (n, _) in state.gave.items()}
            blocks = {"blocks": state.length, "arrived_blocks": state.arrived, **came}
            self.add(request, "fetch", state.begun, blocks)

    def _add(
        self, request: EngineRequest, name: str, begun: float, attributes: Mapping[str, Any]
    ) -> None:
        context = self._context_of(request)
        if context is None:
            return
        end = time.time_ns()
        span = self._tracer.start_span(
            f"flexkv.{name}",
            context=context,
            start_time=end - int((time.monotonic() - begun) * 1e9),
            attributes={
                REQUEST_ID: request.request_id,
                **{f"flexkv.{key}": value for key, value in attributes.items()},
            },
        )
        span.end(end)


class _Transfer(NamedTuple):
    request: EngineRequest
    blocks: int
    begun: float


class TracedWork:
    """The transfers of one engine, until they have ended. Single-threaded. No call raises."""

    def __init__(self, spans: OtelSpans | None = None) -> None:
        self.spans = spans
        self._running: dict[int, _Transfer] = {}

    def began(self, transfer_id: int, request: EngineRequest, blocks: int) -> None:
        """A transfer was ordered for a request, which is borrowed until the end."""
        if self.spans is None:
            return
        if len(self._running) >= _MOST:
            del self._running[next(iter(self._running))]
        self._running[transfer_id] = _Transfer(request, blocks, time.monotonic())

    def ended(self, transfer: Ended) -> None:
        """A transfer has ended."""
        running = self._running.pop(transfer.id, None)
        if running is not None and self.spans is not None:
            attributes = {"blocks": running.blocks, "done": transfer.done}
            name = transfer.direction.name.lower()
            self.spans.add(running.request, name, running.begun, attributes)

    def cancelled(self, transfer_id: int) -> None:
        """A transfer will not begin."""
        self._running.pop(transfer_id, None)
