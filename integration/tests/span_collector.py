# SPDX-License-Identifier: Apache-2.0
"""Receives the spans of engines by OTLP over HTTP. Needs OpenTelemetry's exporter."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE = 0x5A17
HEADERS = {"traceparent": f"00-{TRACE:032x}-{0xB0B:016x}-01"}
"""Of a request that belongs to this trace."""


class Collector(ThreadingHTTPServer):
    """Listens on a port of its own until it is closed.

    Attributes:
        url: to send spans to.
        received: all spans, in the order in which they came.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.received: list[Span] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def names(self, trace: int | None = None) -> set[str]:
        """The names of all spans, or of those of a trace."""
        return {each.name for each in self.of(trace)}

    def of(self, trace: int | None = None) -> list[Span]:
        """All spans, or those of a trace."""
        wanted = None if trace is None else trace.to_bytes(16, "big")
        return [each for each in [*self.received] if wanted in (None, each.trace_id)]


class _Receiver(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert isinstance(self.server, Collector)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.received += scope.spans
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
