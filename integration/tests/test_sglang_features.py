# SPDX-License-Identifier: Apache-2.0
"""Features of a real SGLang beside FlexKV: each gives the tokens of the same server without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.campaign.counts import Counts
from integration.harness.checkpoint import TINY
from integration.sglang.linker import linker_config
from integration.sglang.server import Answer, ServerConfig, SglangServer
from integration.tests.sglang_linked import PATIENCE, tokens

ANSWER = 20
PROMPTS = [tokens(f"feature {number}", length) for number, length in enumerate((190, 333, 1111))]
OVERLAP_OFF = {"disable_overlap_schedule": True}


@dataclass(frozen=True, slots=True)
class Feature:
    """A server, and what it is asked.

    Attributes:
        flags: of its command line.
        fields: of the requests.
        page: tokens of a page.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    page: int = 16


FEATURES = {
    "pages of 1": Feature(page=1),
    "pages of 64": Feature(page=64),
    "without overlap": Feature(OVERLAP_OFF),
    "prompts in small chunks": Feature({"chunked_prefill_size": 128}),
    "chunks beside decoding": Feature({"enable_mixed_chunk": True}),
    "priorities": Feature(
        {
            "enable_priority_scheduling": True,
            "retraction_policy": "priority",
            "radix_eviction_policy": "priority",
        },
        {"priority": 3},
    ),
    # With these sessions, SGLang's prefix cache is the one in Python instead of Rust.
    "sessions of the prefix cache": Feature(
        {"enable_session_radix_cache": True}, {"session_id": "conversation"}
    ),
    "other policies": Feature(
        {
            "schedule_policy": "lpm",
            "radix_eviction_policy": "slru",
            "num_continuous_decode_steps": 4,
        }
    ),
}


@pytest.fixture
def start(
    tmp_path: Path, model: Path, sglang: Path
) -> Iterator[Callable[[Feature, bool], SglangServer]]:
    servers: list[SglangServer] = []

    def make(feature: Feature, cached: bool) -> SglangServer:
        name = "cached" if cached else "plain"
        settings = {
            "FLEXKV_CPU_CACHE_GB": "0.05",
            "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
            "FLEXKV_ALWAYS_LOAD": "1",
        }
        flags = feature.flags
        config = (
            linker_config(model, TINY, settings, flags=flags, page_size=feature.page, forked=True)
            if cached
            else ServerConfig(model, TINY, page_size=feature.page, flags=flags, forked=True)
        )
        servers.append(SglangServer(config, tmp_path / f"{name}.log"))
        return servers[-1]

    yield make
    for each in servers:
        each.close()


def ask_all(server: SglangServer, fields: dict[str, Any]) -> list[Answer]:
    """All prompts at once, once nothing is under way."""
    return server.generate_all(PROMPTS, ANSWER, **fields)


def settle(server: SglangServer) -> None:
    deadline = time.monotonic() + PATIENCE
    server.await_steps()
    while Counts(server.metrics(), "sglang:").total("flexkv_queue_length"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_gives_equal_tokens(
    start: Callable[[Feature, bool], SglangServer], name: str
) -> None:
    feature = FEATURES[name]
    plain = start(feature, False)
    wanted = [each.tokens for each in ask_all(plain, feature.fields)]
    plain.close()
    server = start(feature, True)
    first = ask_all(server, feature.fields)
    assert [each.tokens for each in first] == wanted
    assert [each.cached_tokens for each in first] == [0] * len(PROMPTS)
    settle(server)
    server.flush()
    server.overwrite(after_each=lambda: settle(server))
    again = ask_all(server, feature.fields)
    assert [each.tokens for each in again] == wanted
    found = [(len(prompt) - 1) // feature.page * feature.page for prompt in PROMPTS]
    assert [each.cached_tokens for each in again] == found
