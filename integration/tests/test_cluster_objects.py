# SPDX-License-Identifier: Apache-2.0
"""Engines share blocks by an S3 server that someone else wrote: alone, and below Mooncake Store and
a disk."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

from integration.harness import bad_network
from integration.harness.bad_network import BadNetwork
from integration.harness.engine import Engine
from integration.harness.mooncake_master import MooncakeMaster
from integration.harness.s3_server import BUCKET, S3Server
from integration.tests import disks
from integration.tests.corpus import ABORTED, CONCURRENT, EVICTED, FLEXKV_BLOCK, WARM, Tokens
from integration.tests.disks import ask_and_settle, restorable, restored
from integration.tests.nodes import (
    PATIENCE_SECONDS,
    Nodes,
    hits_by_tier,
    leave_host_memory,
    store,
    submit_all,
)
from integration.tests.reference import Reference
from integration.tests.steps import ask, ask_each

BLOCKS = "cache/blocks/"
OBJECTS = {"objects_url": f"s3://{BUCKET}/cache"}
FIRST = ABORTED[:1] + WARM
LATE = EVICTED[:6]


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as found:
        yield found


def test_a_bucket_outlives_the_node_that_filled_it(
    nodes: Nodes, server: S3Server, reference: Reference
) -> None:
    def held() -> int:
        return server.objects(BLOCKS)

    one = nodes.start(env=server.environ, **OBJECTS)
    reference.check_all(FIRST, store(one, FIRST, held), what="the first node")
    store(one, LATE, held)
    one.close()
    assert server.requests("GET", BLOCKS) == 0

    other = nodes.start(env=server.environ, **OBJECTS)
    found = ask_each(other, FIRST)
    reference.check_all(FIRST, found, what="the other node")
    assert restored(found) == restorable(FIRST)
    assert hits_by_tier(other) == {"objects": sum(restorable(FIRST))}
    assert server.requests("GET", BLOCKS) == sum(restorable(FIRST)) // FLEXKV_BLOCK

    # A wrong byte is a miss.
    last = LATE[-1]
    whole = server.damage(server.paths(BLOCKS))
    answer = ask(other, last)
    reference.check(last, answer, what="over damage")
    assert not answer.cached_tokens
    server.put_back(whole)

    # The server hangs while requests ask it and read from it, and is back.
    waiting = submit_all(other, LATE[:4] + CONCURRENT)
    server.pause()
    answers = [each.result() for each in waiting]
    reference.check_all(LATE[:4] + CONCURRENT, answers, what="while the server hangs")
    server.go_on()
    _await_hit(other, LATE[4], reference)


@pytest.mark.skipif(bad_network.possible() is not None, reason=str(bad_network.possible()))
def test_a_bad_network_before_a_bucket_costs_hits_and_nothing_else(
    nodes: Nodes, reference: Reference
) -> None:
    with BadNetwork() as network, S3Server(network) as server:
        deadlines = {"objects_question_seconds": 0.6, "objects_timeout_seconds": 2.0}
        engine = nodes.start(env=server.environ, **OBJECTS | deadlines)

        def openings() -> float:
            return engine.counter("vllm:flexkv_circuit_openings", tier="objects")

        reference.check_all(LATE, ask_each(engine, LATE), what="over a good network")
        _await_hit(engine, LATE[0], reference)

        # 400 ms there and 400 ms back: every question is late.
        network.set(delay=0.4)
        late = time.monotonic() + PATIENCE_SECONDS
        for attempt in itertools.count():
            waiting = submit_all(engine, CONCURRENT, cache_salt=f"slow {attempt}")
            answers = [each.result() for each in waiting]
            reference.check_all(CONCURRENT, answers, what="over a slow network")
            if openings():
                break
            assert time.monotonic() < late

        network.set(loss=0.3)
        waiting = submit_all(engine, LATE + CONCURRENT, cache_salt="lost")
        answers = [each.result() for each in waiting]
        reference.check_all(LATE + CONCURRENT, answers, what="over a network that loses packets")

        network.set()
        _await_hit(engine, LATE[0], reference)


def _await_hit(engine: Engine, prompt: Tokens, reference: Reference) -> None:
    """Ask until the answer comes from the bucket, which may have to get its blocks first."""
    late = time.monotonic() + PATIENCE_SECONDS
    before = hits_by_tier(engine).get("objects", 0)
    while True:
        reference.check(prompt, ask(engine, prompt), what="with the bucket back")
        if hits_by_tier(engine).get("objects", 0) > before:
            return
        assert time.monotonic() < late
        leave_host_memory(engine, ABORTED[1:])


def test_a_disk_mooncake_and_a_bucket(nodes: Nodes, server: S3Server, reference: Reference) -> None:
    """Blocks come from the nearest tier that has them, and from the next when it is lost."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)

    with MooncakeMaster(segment_gb=1 / 16) as master:

        def held() -> int:
            return min(server.objects(BLOCKS), master.metric("key_count"))

        disk = {"ssd_cache_gb": disks.gigabytes(disks.ROOMY), "ssd_cache_dir": ""}
        settings = master.settings | OBJECTS | disk
        one = nodes.start(env=server.environ, **settings)
        store(one, FIRST + LATE, held)
        assert master.metric("key_count") == server.objects(BLOCKS)

        other = nodes.start(env=server.environ, **settings)
        near = ask_and_settle(other, FIRST)
        reference.check_all(FIRST, near, what="from Mooncake")
        assert restored(near) == restorable(FIRST)
        expected = {"mooncake": sum(restorable(FIRST))}
        assert hits_by_tier(other) == expected
        assert server.requests("GET", BLOCKS) == 0

        one.close()
        far = ask_and_settle(other, LATE)
        reference.check_all(LATE, far, what="from the bucket")
        assert restored(far) == restorable(LATE)
        expected["objects"] = sum(restorable(LATE))
        assert hits_by_tier(other) == expected
        assert server.requests("GET", BLOCKS) == sum(restorable(LATE)) // FLEXKV_BLOCK

    server.kill()
    leave_host_memory(other, ABORTED[1:])
    again = ask_and_settle(other, FIRST + LATE)
    reference.check_all(FIRST + LATE, again, what="from disk")
    assert restored(again) == restorable(FIRST + LATE)
    expected["disk"] = sum(restorable(FIRST + LATE))
    assert hits_by_tier(other) == expected
