# SPDX-License-Identifier: Apache-2.0
"""Nodes, processes with arenas of their own, share blocks by an S3 server that someone else wrote,
and live on without it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

import obstore
from shared_node import FINGERPRINT, Remote, check_sharing

from flexkv.tiers.objects.open_objects import connect
from integration.harness import bad_network
from integration.harness.bad_network import BadNetwork
from integration.harness.s3_server import BUCKET, KEY, SECRET, S3Server
from packages.conftest import PATIENCE_SECONDS
from packages.patience import patient_objects, wait_until

URL = f"s3://{BUCKET}/cache"
SETTINGS = patient_objects(URL)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


Start = Callable[..., Remote]


@pytest.fixture
def start(server: S3Server, at_end: ExitStack) -> Start:
    def make(environ: dict[str, str] | None = None, **settings: Any) -> Remote:
        node = Remote(SETTINGS | settings, server.environ | (environ or {}))
        return at_end.enter_context(closing(node))

    return make


def test_a_node_finds_what_another_has_stored(
    start: Start, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    one.do("store", "abcd")
    ended, _, log = one.end()
    assert ended
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)

    def damage() -> None:
        bucket = connect(URL, PATIENCE_SECONDS)
        (path,) = (
            each["path"]
            for page in obstore.list(bucket, f"blocks/{FINGERPRINT}")
            for each in page
            if each["path"].endswith((b"b" * 32).hex())
        )
        data = bytearray(obstore.get(bucket, path).bytes())
        data[-1] ^= 1
        obstore.put(bucket, path, bytes(data))

    check_sharing(start, start(), damage)
    assert SECRET not in log


def test_a_server_that_hangs_or_dies_costs_hits_and_nothing_else(
    start: Start, server: S3Server
) -> None:
    node = start(objects_question_seconds=0.2, objects_timeout_seconds=0.5)
    node.do("store", "pqr")
    server.pause()
    assert node.do("fetch", "xy") == ""
    node.do("store", "st")
    ended, _, _ = node.end()
    server.go_on()
    assert ended
    node = start(objects_timeout_seconds=2.0)
    server.kill()
    for i in range(20):
        assert node.do("fetch", chr(ord("A") + i)) == ""
    assert node.do("state") != "closed"
    server.restart()
    wait_until(lambda: node.do("state") == "closed", lambda: node.do("fetch", "0"))
    node.do("store", "uvw")
    ended, _, log = node.end()
    assert ended
    assert log.count(" consecutive ") == 1
    assert SECRET not in log


@pytest.mark.skipif(bad_network.possible() is not None, reason=str(bad_network.possible()))
def test_a_bad_network_costs_hits_and_nothing_else(start: Start) -> None:
    with BadNetwork() as network, S3Server(network) as far:
        node = start(far.environ, objects_question_seconds=0.3, objects_timeout_seconds=1.0)
        fresh = map(chr, itertools.count(0x4E00))
        late = time.monotonic() + PATIENCE_SECONDS

        # 200 ms there and 200 ms back: every question is late.
        network.set(delay=0.2)
        while node.do("state") == "closed":
            assert time.monotonic() < late
            node.do("store", text := next(fresh))
            assert text.startswith(node.do("fetch", text + next(fresh)))

        network.set(loss=0.3)
        for text in itertools.islice(fresh, 5):
            node.do("store", text)
            assert text.startswith(node.do("fetch", text + next(fresh)))

        network.set()
        other = start(far.environ)
        late = time.monotonic() + PATIENCE_SECONDS
        for text in fresh:
            assert time.monotonic() < late
            node.do("store", text)
            node.do("fetch", next(fresh))
            if other.do("fetch", text) == text and node.do("state") == "closed":
                break
            time.sleep(0.2)


def test_wrong_credentials_leave_the_engine_alone(start: Start, server: S3Server) -> None:
    server.check_credentials(True)
    try:
        node = start()
        assert node.do("fetch", "ab") == ""
        node.do("store", "ab")
        assert node.do("fetch", "ab") == "ab"
        ended, _, log = node.end()
    finally:
        server.check_credentials(False)
    assert ended
    assert f"objects_url {URL}" in log
    assert "PermissionDeniedError" in log
    assert SECRET not in log
    assert KEY not in log
