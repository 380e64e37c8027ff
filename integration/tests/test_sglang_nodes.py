# SPDX-License-Identifier: Apache-2.0
"""Two nodes with a real SGLang, one after the other, share a bucket of an S3 server.

The first one also records its requests, which `flexkv plan` reads.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

from flexkv.plan.curve import LRUCurve
from flexkv.plan.read import TraceFile, read_trace
from integration.campaign.counts import Counts
from integration.harness.checkpoint import TINY
from integration.harness.prompts import random_tokens
from integration.harness.s3_server import BUCKET, S3Server
from integration.sglang.linker import PAGE_TOKENS, linker_config
from integration.sglang.server import Answer, SglangServer
from integration.tests.sglang_linked import settle

ANSWER = 20
PATIENCE = 60.0
BLOCKS = "cache/blocks/"
STEM = random_tokens("recorded", 200, TINY.vocab)
NEXT = random_tokens("next", 50, TINY.vocab)


@dataclass
class Node:
    """A node whose only lower tier is the bucket.

    Attributes:
        server: its SGLang.
        trace: where it records its requests.
    """

    server: SglangServer
    trace: Path

    def ask(self, prompt: list[int], **request: Any) -> Answer:
        return self.server.generate(prompt, ANSWER, **request)

    def hits(self, tier: str) -> int:
        return self._counts().value("flexkv_hit_tokens_total", tier=tier)

    def settle(self) -> None:
        """Wait until all that was stored is in the bucket."""
        settle(self.server)

    def _counts(self) -> Counts:
        return Counts(self.server.metrics(), "sglang:")


@dataclass
class Cluster:
    """Attributes:
    folder: of all nodes.
    model: that they serve.
    bucket: that they share.
    node: the one that lives.
    turn: a prompt that it knows.
    said: what it answered to that.
    """

    folder: Path
    model: Path
    bucket: S3Server
    node: Node
    turn: list[int]
    said: list[int]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    with S3Server() as bucket:
        made = Cluster(folder, model, bucket, start(folder / "one", model, bucket), [], [])
        try:
            yield made
        finally:
            made.node.server.close()


def start(folder: Path, model: Path, bucket: S3Server) -> Node:
    """Start a node with folders of its own."""
    trace = folder / "trace.jsonl"
    settings = bucket.environ | {
        "FLEXKV_CPU_CACHE_GB": "0.05",
        "FLEXKV_RUNTIME_DIR": str(folder / "run"),
        "FLEXKV_ALWAYS_LOAD": "1",
        "FLEXKV_TRACE": str(trace),
        "FLEXKV_OBJECTS_URL": f"s3://{BUCKET}/cache",
        # A busy machine must not decide a test. A bucket that hangs costs one as long.
        "FLEXKV_OBJECTS_QUESTION_SECONDS": "5",
        "FLEXKV_OBJECTS_TIMEOUT_SECONDS": str(PATIENCE),
    }
    folder.mkdir()
    config = linker_config(model, TINY, settings, forked=True)
    return Node(SglangServer(config, folder / "log"), trace)


def test_what_sglang_computes_is_recorded(cluster: Cluster) -> None:
    node = cluster.node
    answer = node.ask(STEM)
    cluster.turn = turn = [*STEM, *answer.tokens, *NEXT]
    second = node.ask(turn)
    own, cluster.said = second.cached_tokens, second.tokens
    node.server.flush()
    loaded = node.ask([*turn, 5], extra_key="").cached_tokens
    node.ask(STEM, extra_key="tenant")
    read = recorded(node.trace, 4)
    assert stat.S_IMODE(node.trace.stat().st_mode) == 0o600
    trace, measured = read.trace, read.measured
    assert (trace.block_tokens, trace.block_bytes) == (
        PAGE_TOKENS,
        TINY.kv_bytes_per_token * PAGE_TOKENS,
    )
    # SGLang sends itself short requests when it starts.
    ours = [each for each in trace.requests if each.output_tokens == ANSWER]
    assert [each.prompt_tokens for each in ours] == [200, 270, 271, 200]
    first, then, third, other = ours
    assert then.blocks[: len(first.blocks) + len(first.answer)] == [*first.blocks, *first.answer]
    assert third.blocks[: len(then.blocks)] == then.blocks
    assert set(other.blocks).isdisjoint(first.blocks)
    assert measured is not None
    assert (measured.engine_tokens, measured.hit_tokens) == (own, loaded)
    assert own > 0 < loaded
    # With all of memory, what SGLang had itself and what FlexKV loaded is all that can be hit.
    assert LRUCurve(trace, None).at(10_000).hit_tokens == own + loaded


def test_another_node_finds_what_this_one_computed(cluster: Cluster) -> None:
    assert cluster.turn, "the test before this one has failed"
    cluster.node.settle()
    cluster.node.server.close()
    cluster.node = node = start(cluster.folder / "other", cluster.model, cluster.bucket)

    assert node.ask(cluster.turn, extra_key="somebody").cached_tokens == 0
    answer = node.ask(cluster.turn)
    found = (len(cluster.turn) - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert (answer.tokens, answer.cached_tokens) == (cluster.said, found)
    assert node.hits("objects") == found
    assert node.hits("host") == 0


def test_a_damaged_or_hanging_bucket_costs_no_answer(cluster: Cluster) -> None:
    node, tenant = cluster.node, {"extra_key": "tenant"}
    assert node.hits("objects"), "the test before this one has failed"
    whole = cluster.bucket.damage(cluster.bucket.paths(BLOCKS))
    assert node.ask(STEM, **tenant).cached_tokens == 0
    cluster.bucket.put_back(whole)
    cluster.bucket.pause()
    try:
        answer = node.ask(cluster.turn, extra_key="whoever")
    finally:
        cluster.bucket.go_on()
    assert (answer.tokens, answer.cached_tokens) == (cluster.said, 0)


def recorded(path: Path, requests: int) -> TraceFile:
    """The recording, once it has so many requests."""
    deadline = time.monotonic() + PATIENCE
    while path.read_text().count(f'"out":{ANSWER},') < requests and time.monotonic() < deadline:
        time.sleep(0.2)
    return read_trace(str(path))
