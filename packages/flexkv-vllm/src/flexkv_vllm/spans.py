# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of what FlexKV did for a request, beside vLLM's own spans of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexkv.engine.scheduler.engine import EngineRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger("flexkv.vllm")

REQUEST_ID = "gen_ai.request.id"
"""The attribute in which vLLM's own spans have the request's id."""


def make_spans() -> OtelSpans | None:
    """What makes spans. They go where vLLM has this process send its own. None without
    OpenTelemetry, which vLLM's own spans need, too."""
    try:
        from opentelemetry import trace
    except ImportError as error:
        logger.warning("FlexKV makes no spans of requests: %s", error)
        return None
    return OtelSpans(trace.get_tracer("flexkv"))


class OtelSpans:
    """See `RequestSpans`. A span belongs to the trace that the request's headers name.

    Args:
        tracer: makes the spans; it hands them to a thread of its own.
    """

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
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
        headers = getattr(request, "trace_headers", None)
        context = None if headers is None else self._propagator.extract(headers)
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
