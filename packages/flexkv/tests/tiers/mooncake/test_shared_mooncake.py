# SPDX-License-Identifier: Apache-2.0
"""Nodes, processes with arenas of their own, share blocks by a real Mooncake Store, and live on
without it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip(
    "mooncake.store",
    reason="Mooncake Store is not installed: pip install 'flexkv[mooncake]', apt-get install "
    "libibverbs1 librdmacm1 libnuma1",
    exc_type=ImportError,
)

from mooncake.store import MooncakeDistributedStore
from shared_node import FINGERPRINT, SLOT, Remote, await_sharing, texts

from flexkv.tiers.envelope import ENVELOPE_BYTES
from flexkv.tiers.epochs import FRESH_SECONDS, Epochs
from flexkv.tiers.mooncake.mooncake_store import MetadataRecord
from integration.harness.mooncake_master import MooncakeMaster
from packages.conftest import PATIENCE_SECONDS


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    yield master
    master.go_on()
    master.kill()


@pytest.fixture
def start(master: MooncakeMaster) -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def make(**settings: Any) -> Remote:
        patient = dict.fromkeys(
            ("mooncake_question_seconds", "mooncake_timeout_seconds"), PATIENCE_SECONDS
        )
        made.append(Remote(master.settings | patient | settings, {}))
        return made[-1]

    yield make
    for node in made:
        node.kill()


def test_a_node_finds_what_another_has_stored(
    start: Callable[..., Remote], master: MooncakeMaster
) -> None:
    one, other = start(), start(mooncake_segment_gb=0)
    one.do("store", "abcd")
    assert other.do("fetch", "abcdef") == "abcd"
    assert other.do("store", "abcde") == "1"

    # Wrong bytes are a miss, and give way to the right ones.
    url = master.settings["mooncake_metadata"]
    epochs = Epochs(MetadataRecord(url, FINGERPRINT, PATIENCE_SECONDS))
    folder = epochs.folder(epochs.open())
    name = f"flexkv/{FINGERPRINT}/{folder}/{(b'b' * 32).hex()}"
    client = MooncakeDistributedStore()
    address = master.settings["mooncake_master"]
    assert client.setup("127.0.0.1", url, 0, 1 << 24, "tcp", "", address) == 0
    data = bytearray(client.get(name))
    assert len(data) == ENVELOPE_BYTES + SLOT
    data[-1] ^= 1
    assert client.remove(name, True) == 0
    assert client.put(name, bytes(data)) == 0
    third = start()
    assert third.do("fetch", "abc") == "a"
    assert third.do("store", "abc") == "1"
    fourth = start()
    assert fourth.do("fetch", "abcdef") == "abcde"
    client.close()

    # After a reset of one, nobody finds anything of before; the others go on together without it.
    fifth = start()
    third.do("reset")
    assert third.do("fetch", "abc") == ""
    time.sleep(2 * FRESH_SECONDS)
    third.do("store", "mn")
    other.do("store", "pqr")
    assert (fifth.do("fetch", "abc"), fifth.do("fetch", "mn")) == ("", "")
    assert (fifth.do("fetch", "pqr"), third.do("fetch", "pqr")) == ("pqr", "")
    third.end()
    assert [start().do("fetch", text) for text in ("abc", "mn", "pqr")] == [""] * 3


def test_a_full_segment_drops_or_evicts_and_nothing_else(start: Callable[..., Remote]) -> None:
    node = start(mooncake_segment_gb=1 / 64)
    for i in range(20):
        node.do("store", "".join(chr(0x41 + i * 20 + j) for j in range(20)))
    last = "".join(chr(0x41 + 19 * 20 + j) for j in range(20))
    assert node.do("fetch", last) == last
    ended, _, _ = node.end()
    assert ended


def test_a_master_that_hangs_or_dies_costs_hits_and_nothing_else(
    start: Callable[..., Remote], master: MooncakeMaster
) -> None:
    patience = {"mooncake_question_seconds": 0.5, "mooncake_timeout_seconds": 0.5}
    node, other = start(**patience), start(**patience)
    fresh = texts()
    await_sharing(node, other, fresh)
    master.pause()
    assert node.do("fetch", "xy") == ""
    assert node.do("fetch", "xz") == ""
    master.go_on()
    master.kill()
    for i in range(20):
        assert node.do("fetch", chr(ord("A") + i)) == ""
        time.sleep(0.02)
    master.restart()
    # Both join again by themselves: sooner or later one finds what the other has stored.
    await_sharing(node, other, fresh)


def test_nodes_meet_at_a_master_by_ipv6() -> None:
    patient = dict.fromkeys(
        ("mooncake_question_seconds", "mooncake_timeout_seconds"), PATIENCE_SECONDS
    )
    with contextlib.ExitStack() as ending:
        master = ending.enter_context(MooncakeMaster("::1"))
        assert master.settings["mooncake_master"].startswith("[::1]:")
        nodes = [Remote(master.settings | patient, {}) for _ in range(2)]
        for node in nodes:
            ending.callback(node.kill)
        one, other = nodes
        one.do("store", "abc")
        assert other.do("fetch", "abcd") == "abc"
