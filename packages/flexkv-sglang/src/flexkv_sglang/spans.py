# SPDX-License-Identifier: Apache-2.0
"""Spans of requests in SGLang's traces of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.engine.scheduler.spans import ContextOf, OtelSpans, make_spans

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from flexkv.engine.scheduler.engine import EngineRequest


def spans_of_process() -> OtelSpans | None:
    """What makes spans of requests, if SGLang does in this process (`--enable-trace`)."""
    try:
        from sglang.srt.observability.trace import get_global_tracing_enabled
    except ImportError:  # a release that traces otherwise
        return None
    return make_spans(in_sglangs_spans) if get_global_tracing_enabled() else None


def in_sglangs_spans() -> ContextOf:
    """See `ContextOf`: SGLang's own span of the request. None for a request that it does not
    trace."""

    def context_of(request: EngineRequest) -> Context | None:
        trace = request.sglang.time_stats.trace_ctx  # type: ignore[attr-defined]
        return trace.root_span_context if trace.tracing_enable else None

    return context_of
