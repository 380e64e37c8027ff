# SPDX-License-Identifier: Apache-2.0
"""Real servers send spans of what FlexKV does for a request to where they send their own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto", reason="OpenTelemetry's exporter is not installed")

from integration.harness import connector
from integration.harness.checkpoint import TINY
from integration.harness.config import EngineConfig
from integration.harness.host import EngineHost
from integration.harness.prompts import random_tokens
from integration.harness.server import Server
from integration.sglang.linker import PAGE_TOKENS, linker_config
from integration.sglang.server import SglangServer
from integration.tests import corpus
from integration.tests.span_collector import HEADERS, TRACE, Collector

PATIENCE_SECONDS = 600.0
"""For what hangs."""
PROTOCOL = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "200",  # milliseconds, by default 5000
}


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
        connector.plugin(**flexkv()),
        probe=False,
        env=PROTOCOL,
        extra_args={"otlp_traces_endpoint": collector.url},
    )
    body = {
        "token_ids": list(corpus.WARM[0]),
        "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": True},
    }
    with Server(config, tmp_path / "server.log", None) as server:
        late = time.monotonic() + PATIENCE_SECONDS
        while "flexkv.load" not in collector.names(TRACE):
            # Again and again: a prompt whose store has not ended is no hit, an exporter drops what
            # it cannot send in time, and an idle engine reports ends with its next step.
            assert time.monotonic() < late, collector.names()
            server.reset_prefix_cache(external=False)
            json.loads(server.ask("/inference/v1/generate", body, headers=HEADERS))
            time.sleep(0.5)
    assert {"flexkv.load", "flexkv.store"} <= collector.names()


def test_a_request_of_sglang_has_flexkvs_spans_within_its_own(
    tmp_path: Path, host: EngineHost, collector: Collector, model: Path, sglang: Path
) -> None:
    host.close()
    settings = {
        # Less than two prompts: a part of the first one is fetched.
        "FLEXKV_CPU_CACHE_GB": f"{12 * PAGE_TOKENS * TINY.kv_bytes_per_token / (1 << 30):.6f}",
        "FLEXKV_SSD_CACHE_GB": "0.25",
        "FLEXKV_SSD_CACHE_DIR": str(tmp_path / "disk"),
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
        "FLEXKV_ALWAYS_LOAD": "1",
    }
    flags = {"enable_trace": True, "otlp_traces_endpoint": collector.url}
    config = linker_config(model, TINY, settings | PROTOCOL, forked=True, flags=flags)
    prompt = random_tokens("traced", 10 * PAGE_TOKENS + 1, TINY.vocab)
    with SglangServer(config, tmp_path / "server.log") as server:
        server.generate(prompt, 1)
        server.generate([*reversed(prompt)], 1)
        server.await_steps()
        server.flush()
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        server.ask("/generate", body, headers=HEADERS)
        late = time.monotonic() + PATIENCE_SECONDS
        while not {"flexkv.load", "flexkv.fetch"} <= collector.names(TRACE):
            assert time.monotonic() < late, collector.names(TRACE)
            time.sleep(0.5)
    own = {each.span_id for each in collector.of(TRACE) if not each.name.startswith("flexkv.")}
    ours = [each for each in collector.of(TRACE) if each.name.startswith("flexkv.")]
    assert own.issuperset(each.parent_span_id for each in ours)
