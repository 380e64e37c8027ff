# SPDX-License-Identifier: Apache-2.0
"""Spans of requests, by OpenTelemetry's own SDK, under vLLM's real scheduler."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, fill, prompts
from engine_world import MakeWorld, World

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flexkv.engine.scheduler.spans import REQUEST_ID, OtelSpans
from flexkv_vllm.settings import by_headers, request_spans_of

TRACE, PARENT = 0x5A17, 0xB0B
FETCHED = ("fetch", "load")
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}


class Exported:
    """The spans that were exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = OtelSpans(provider.get_tracer("flexkv"), by_headers())

    def of(self, request_id: str) -> dict[str, list[ReadableSpan]]:
        """Those of a request by name. A load may have several parts, and a fetch begin anew when
        the turn of its request comes."""
        found: dict[str, list[ReadableSpan]] = {}
        for each in self._exporter.get_finished_spans():
            if (each.attributes or {})[REQUEST_ID] == request_id:
                found.setdefault(each.name, []).append(each)
        return found


def numbers(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if name != REQUEST_ID}


def check_spans(world: World, exported: Exported) -> None:
    """A prompt that the disk has is fetched and loaded within the trace that its headers name."""
    texts = prompts(1, 4)
    began = time.time_ns()
    fill(world, texts)
    assert exported.of("r0").keys() == {"flexkv.store"}
    stores = exported.of("r0")["flexkv.store"]
    assert sum(numbers(each)["flexkv.blocks"] for each in stores) == PROMPT_BLOCKS
    assert all(numbers(each)["flexkv.done"] for each in stores)
    assert {each.parent for each in stores} == {None}

    again = world.add(texts[0])
    world.requests[again].trace_headers = HEADERS
    world.run()
    world.settle()
    spans = exported.of(again)
    fetched, loads = [[numbers(each) for each in spans[f"flexkv.{name}"]] for name in FETCHED]
    assert fetched[-1] == {
        "flexkv.blocks": PROMPT_BLOCKS,
        "flexkv.arrived_blocks": PROMPT_BLOCKS,
        "flexkv.disk_blocks": PROMPT_BLOCKS,
    }
    assert sum(each["flexkv.blocks"] for each in loads) == PROMPT_BLOCKS
    assert all(each["flexkv.done"] for each in loads)
    for span in itertools.chain(*spans.values()):
        assert span.context is not None
        assert span.parent is not None
        assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
        assert span.start_time is not None
        assert span.end_time is not None
        assert began < span.start_time <= span.end_time <= time.time_ns()
    world.check_outputs()


def test_a_request_has_spans_of_its_fetch_its_load_and_its_store(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = Exported()
    monkeypatch.setattr("flexkv_vllm.start_scheduler.request_spans_of", lambda _: exported.spans)
    check_spans(make_world(slots=14, disk_slots=100, budget=256), exported)


def test_a_tracer_that_fails_costs_no_request(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room for spans")

    spans = OtelSpans(SimpleNamespace(start_span=fail), by_headers())  # type: ignore[arg-type]
    monkeypatch.setattr("flexkv_vllm.start_scheduler.request_spans_of", lambda _: spans)
    world = make_world(slots=14, disk_slots=100)
    texts = prompts(1, 4)
    fill(world, texts)
    again = world.generate(texts[0])
    assert world.external_tokens[again] > 0
    assert sum("no room for spans" in each.getMessage() for each in caplog.records) == 1
    world.check_outputs()


def test_spans_are_made_only_where_vllm_makes_them() -> None:
    def config(endpoint: str | None) -> Any:
        return SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))

    assert isinstance(request_spans_of(config("http://localhost:4317")), OtelSpans)
    assert request_spans_of(config(None)) is None
    assert request_spans_of(SimpleNamespace()) is None  # type: ignore[arg-type]
