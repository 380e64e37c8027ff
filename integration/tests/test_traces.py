# SPDX-License-Identifier: Apache-2.0
"""A real server sends spans of what FlexKV does for a request to where it sends its own."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto", reason="OpenTelemetry's exporter is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.host import EngineHost
from integration.harness.server import Server
from integration.tests.corpus import WARM

PATIENCE_SECONDS = 120.0
TRACE = 0x5A17
HEADERS = {"traceparent": f"00-{TRACE:032x}-{0xB0B:016x}-01"}


class Collector(ThreadingHTTPServer):
    """Receives spans by OTLP over HTTP.

    Attributes:
        names: the names of the spans of each trace.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.names: dict[int, set[str]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()


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
                for span in scope.spans:
                    trace = int.from_bytes(span.trace_id, "big")
                    self.server.names.setdefault(trace, set()).add(span.name)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made
        made.shutdown()


def test_a_request_has_flexkvs_spans_in_its_trace(
    tmp_path: Path,
    host: EngineHost,
    collector: Collector,
    engine_config: Callable[..., EngineConfig],
    flexkv: Callable[..., dict[str, Any]],
) -> None:
    host.close()
    config = engine_config(
        connector.plugin(**flexkv(always_load=True)),
        probe=False,
        env={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
        extra_args={"otlp_traces_endpoint": f"http://127.0.0.1:{collector.server_port}/v1/traces"},
    )
    with Server(config, tmp_path / "server.log", None) as server:
        server.generate(WARM[0], 4)
        server.reset_prefix_cache(external=False)
        body = {
            "token_ids": list(WARM[0]),
            "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": True},
        }
        json.loads(server.ask("/inference/v1/generate", body, headers=HEADERS))
        late = time.monotonic() + PATIENCE_SECONDS
        while "flexkv.load" not in collector.names.get(TRACE, ()):
            assert time.monotonic() < late, collector.names
            server.generate(WARM[1], 1)  # an idle engine reports ends with its next step
            time.sleep(0.5)
    every = set().union(*collector.names.values())
    assert {"flexkv.load", "flexkv.store"} <= every
