# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of what FlexKV did for a request, beside the engine's own spans of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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


def make_spans(make_context_of: Callable[[], ContextOf]) -> OtelSpans | None:
    """What makes spans. They go where the engine has this process send its own. None without
    OpenTelemetry, which the engine's own spans need, too.

    Args:
        make_context_of: called once OpenTelemetry is there.
    """
    try:
        from opentelemetry import trace

        context_of = make_context_of()
    except ImportError as error:
        logger.warning("FlexKV makes no spans of requests: %s", error)
        return None
    return OtelSpans(trace.get_tracer("flexkv"), context_of)


class OtelSpans:
    """See `RequestSpans`.

    Args:
        tracer: makes the spans; it hands them to a thread of its own.
        context_of: see `ContextOf`.
    """

    def __init__(self, tracer: Tracer, context_of: ContextOf) -> None:
        self._tracer = tracer
        self._context_of = context_of
        self._has_failed = False

    def add(
        self, request: EngineRequest, name: str, begun: float, attributes: Mapping[str, int | bool]
    ) -> None:
        """See `RequestSpans.add`."""
        try:
            self._add(request, name, begun, attributes)
        except Exception as error:  # noqa: BLE001 - a span is worth no request
            if not self._has_failed:
                logger.error("a span of a request was not made (logged once): %r", error)
            self._has_failed = True

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
