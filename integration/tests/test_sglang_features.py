# SPDX-License-Identifier: Apache-2.0
"""Features of a real SGLang beside FlexKV: they give the tokens of the same server without it. Each
of three servers has several."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.campaign.counts import Counts
from integration.harness.checkpoint import TINY
from integration.sglang.linker import linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import ServerConfig, SglangServer
from integration.tests.sglang_linked import PATIENCE, tokens

ANSWER = 20
PROMPTS = [tokens(f"feature {number}", length) for number, length in enumerate((190, 333, 1111))]


@dataclass(frozen=True, slots=True)
class Features:
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
    "pages of 1, small chunks, priorities": Features(
        {
            "chunked_prefill_size": 128,
            "enable_priority_scheduling": True,
            "retraction_policy": "priority",
            "radix_eviction_policy": "priority",
        },
        {"priority": 3},
        page=1,
    ),
    "pages of 64, no overlap, other policies": Features(
        {
            "disable_overlap_schedule": True,
            "schedule_policy": "lpm",
            "radix_eviction_policy": "slru",
            "num_continuous_decode_steps": 4,
        },
        page=64,
    ),
    # With these sessions, SGLang's prefix cache is the one in Python instead of Rust.
    "chunks beside decoding, sessions of the prefix cache": Features(
        {"enable_mixed_chunk": True, "enable_session_radix_cache": True},
        {"session_id": "conversation"},
    ),
}


def settle(server: SglangServer) -> None:
    deadline = time.monotonic() + PATIENCE
    server.await_steps()
    while Counts(server.metrics(), "sglang:").total("flexkv_queue_length"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", FEATURES)
def test_features_give_equal_tokens(tmp_path: Path, model: Path, sglang: Path, name: str) -> None:
    features = FEATURES[name]
    settings = {
        "FLEXKV_CPU_CACHE_GB": "0.05",
        "FLEXKV_RUNTIME_DIR": str(tmp_path / "run"),
        "FLEXKV_ALWAYS_LOAD": "1",
    }
    common: dict[str, Any] = {"flags": features.flags, "page_size": features.page, "forked": True}
    # All prompts at once.
    with PlainServer(ServerConfig(model, TINY, **common), tmp_path / "plain.log") as plain:
        answers = plain.generate_all(PROMPTS, ANSWER, **features.fields)
    wanted = [each.tokens for each in answers]
    config = linker_config(model, TINY, settings, **common)
    with SglangServer(config, tmp_path / "cached.log") as server:
        first = server.generate_all(PROMPTS, ANSWER, **features.fields)
        assert [each.tokens for each in first] == wanted
        assert [each.cached_tokens for each in first] == [0] * len(PROMPTS)
        settle(server)
        server.flush()
        server.overwrite(after_each=lambda: settle(server))
        again = server.generate_all(PROMPTS, ANSWER, **features.fields)
    assert [each.tokens for each in again] == wanted
    found = [(len(prompt) - 1) // features.page * features.page for prompt in PROMPTS]
    assert [each.cached_tokens for each in again] == found
