# SPDX-License-Identifier: Apache-2.0
"""Features of a real SGLang beside FlexKV: they give the tokens of the same server without it. Each
of three servers has several."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.harness.checkpoint import TINY
from integration.tests.sglang_kinds import ANSWER, Kind, Servers
from integration.tests.sglang_linked import forget, tokens

PROMPTS = [tokens(f"feature {number}", length) for number, length in enumerate((190, 333, 1111))]

FEATURES = {
    "pages of 1, small chunks, priorities": Kind(
        1,
        flags={
            "chunked_prefill_size": 128,
            "enable_priority_scheduling": True,
            "retraction_policy": "priority",
            "radix_eviction_policy": "priority",
        },
        asked={"priority": 3},
    ),
    "pages of 64, no overlap, other policies": Kind(
        64,
        flags={
            "disable_overlap_schedule": True,
            "schedule_policy": "lpm",
            "radix_eviction_policy": "slru",
            "num_continuous_decode_steps": 4,
        },
    ),
    # With these sessions, SGLang's prefix cache is the one in Python instead of Rust.
    "chunks beside decoding, sessions of the prefix cache": Kind(
        flags={"enable_mixed_chunk": True, "enable_session_radix_cache": True},
        asked={"session_id": "conversation"},
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_give_equal_tokens(tmp_path: Path, model: Path, sglang: Path, name: str) -> None:
    kind = FEATURES[name]
    servers = Servers(tmp_path, model, TINY, "0.05")
    # All prompts at once.
    with servers.plain(kind) as plain:
        wanted = [each.tokens for each in plain.generate_all(PROMPTS, ANSWER, **kind.asked)]
    with servers.start(kind) as server:
        first = server.generate_all(PROMPTS, ANSWER, **kind.asked)
        assert [each.tokens for each in first] == wanted
        assert [each.cached_tokens for each in first] == [0] * len(PROMPTS)
        forget(server)
        again = server.generate_all(PROMPTS, ANSWER, **kind.asked)
    assert [each.tokens for each in again] == wanted
    assert [each.cached_tokens for each in again] == list(map(kind.pages_of, PROMPTS))
