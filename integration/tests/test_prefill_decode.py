# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of two nodes, which share a bucket: what a router passes on from
the answer of one to the other lets no prompt be computed twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

from integration.campaign.counts import Counts
from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.host import EngineHost
from integration.harness.s3_server import BUCKET, S3Server
from integration.harness.server import Server
from integration.tests.corpus import EVICTED, NEW_TOKENS, Tokens
from integration.tests.disks import restorable
from integration.tests.nodes import SETTINGS
from integration.tests.reference import Reference


def answer_of(
    server: Server, prompt: Tokens, max_tokens: int, params: Any
) -> tuple[list[int], Any]:
    """The tokens that follow a prompt, and the parameters for the next engine."""
    body = {
        "token_ids": list(prompt),
        "sampling_params": {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
        "kv_transfer_params": params,
    }
    answer = json.loads(server.ask("/inference/v1/generate", body))
    return answer["choices"][0]["token_ids"], answer.get("kv_transfer_params")


def test_a_decode_engine_gets_every_prompt_whole(
    tmp_path: Path,
    host: EngineHost,
    reference: Reference,
    engine_config: Callable[..., EngineConfig],
    flexkv: Callable[..., dict[str, Any]],
) -> None:
    host.close()  # two servers take the memory of its engine
    with S3Server() as store:

        def start(role: str) -> Server:
            settings = SETTINGS | {
                "runtime_dir": str(tmp_path / role),
                "objects_url": f"s3://{BUCKET}/cache",
                "always_load": True,
            }
            chosen = connector.plugin(role=role, recompute=True, **flexkv(**settings))
            config = engine_config(chosen, probe=False, env=store.environ)
            return Server(config, tmp_path / f"{role}.log", None)

        with start("kv_producer") as prefill, start("kv_consumer") as decode:
            for prompt in EVICTED:
                _, announced = answer_of(prefill, prompt, 1, None)
                (tokens,) = restorable([prompt])
                assert announced == {"flexkv.announced_tokens": tokens}
                answer, _ = answer_of(decode, prompt, NEW_TOKENS, announced)
                assert answer == reference.of(prompt).tokens
            counts = Counts(decode.metrics(), "vllm:")
    assert counts.value("flexkv_hit_tokens_total", tier="objects") == sum(restorable(EVICTED))
