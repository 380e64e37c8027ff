# SPDX-License-Identifier: Apache-2.0
"""Spans of requests in the traces that vLLM's clients name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.engine.scheduler.spans import ContextOf

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from flexkv.engine.scheduler.engine import EngineRequest


def by_headers() -> ContextOf:
    """See `ContextOf`: the trace that the request's headers name. Raises ImportError without
    OpenTelemetry."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()

    def context_of(request: EngineRequest) -> Context:
        headers = getattr(request, "trace_headers", None)
        return Context() if headers is None else propagator.extract(headers)

    return context_of
