# SPDX-License-Identifier: Apache-2.0
"""Nodes, processes with arenas of their own, share blocks by a real Mooncake Store, and live on
without it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip(
    "mooncake.store",
    reason="Mooncake Store is not installed: pip install 'flexkv[mooncake]', apt-get install "
    "libibverbs1 librdmacm1 libnuma1",
    exc_type=ImportError,
)

from mooncake.store import MooncakeDistributedStore
from shared_node import FINGERPRINT, SLOT, Remote, await_sharing, check_sharing, texts

from flexkv.tiers.envelope import ENVELOPE_BYTES
from flexkv.tiers.epochs import FRESH_SECONDS, Epochs
from flexkv.tiers.mooncake.metadata_record import MetadataRecord
from integration.harness.mooncake_master import Etcd, MooncakeMaster
from packages.conftest import PATIENCE_SECONDS


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    yield master
    master.go_on()
    master.kill()


Start = Callable[..., Remote]


@pytest.fixture
def start(master: MooncakeMaster, at_end: ExitStack) -> Start:
    def make(**settings: Any) -> Remote:
        patient = dict.fromkeys(
            ("mooncake_question_seconds", "mooncake_timeout_seconds"), PATIENCE_SECONDS
        )
        return at_end.enter_context(closing(Remote(master.settings | patient | settings, {})))

    return make


def test_a_node_finds_what_another_has_stored(start: Start, master: MooncakeMaster) -> None:
    one, other = start(), start(mooncake_segment_gb=0)
    one.do("store", "abcd")
    url = master.settings["mooncake_metadata"]
    client = MooncakeDistributedStore()
    address = master.settings["mooncake_master"]
    assert client.setup("127.0.0.1", url, 0, 1 << 24, "tcp", "", address) == 0

    def damage() -> None:
        epochs = Epochs(MetadataRecord(url, FINGERPRINT, PATIENCE_SECONDS))
        folder = epochs.folder(epochs.open())
        name = f"flexkv/{FINGERPRINT}/{folder}/{(b'b' * 32).hex()}"
        data = bytearray(client.get(name))
        assert len(data) == ENVELOPE_BYTES + SLOT
        data[-1] ^= 1
        assert client.remove(name, True) == 0
        assert client.put(name, bytes(data)) == 0

    check_sharing(start, other, damage)
    client.close()


def test_a_full_segment_drops_or_evicts_and_nothing_else(start: Start) -> None:
    node = start(mooncake_segment_gb=1 / 64)
    for i in range(20):
        node.do("store", "".join(chr(0x41 + i * 20 + j) for j in range(20)))
    last = "".join(chr(0x41 + 19 * 20 + j) for j in range(20))
    assert node.do("fetch", last) == last
    ended, _, _ = node.end()
    assert ended


def test_a_master_that_hangs_or_dies_costs_hits_and_nothing_else(
    start: Start, master: MooncakeMaster
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


def join(at_end: ExitStack, settings: dict[str, Any], count: int) -> list[Remote]:
    """Nodes that wait for the store as long as they must."""
    patient = dict.fromkeys(
        ("mooncake_question_seconds", "mooncake_timeout_seconds"), PATIENCE_SECONDS
    )
    nodes = []
    for _ in range(count):
        nodes.append(Remote(settings | patient, {}))
        at_end.callback(nodes[-1].kill)
    return nodes


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("metadata", [True, False], ids=["metadata server", "none"])
def test_nodes_meet(at_end: ExitStack, address: str, metadata: bool) -> None:
    master = at_end.enter_context(MooncakeMaster(address, metadata=metadata))
    assert master.settings["mooncake_master"].startswith("[::1]:") == (address == "::1")
    one, other = join(at_end, master.settings, 2)
    one.do("store", "abc")
    assert other.do("fetch", "abcd") == "abc"


def test_without_a_metadata_server_a_reset_hides_older_blocks(at_end: ExitStack) -> None:
    master = at_end.enter_context(MooncakeMaster(metadata=False))
    one, other = join(at_end, master.settings, 2)
    one.do("store", "abc")
    assert other.do("fetch", "abc") == "abc"
    one.do("reset")
    time.sleep(2 * FRESH_SECONDS)
    (third,) = join(at_end, master.settings, 1)
    assert third.do("fetch", "abc") == ""
    # Of the old epoch and of the new one, each with its own kind.
    other.do("store", "pqr")
    third.do("store", "mn")
    assert (third.do("fetch", "pqr"), other.do("fetch", "mn")) == ("", "")
    (fourth,) = join(at_end, master.settings, 1)
    assert fourth.do("fetch", "mn") == "mn"


def test_the_record_outlives_the_node_that_made_it(at_end: ExitStack) -> None:
    master = at_end.enter_context(MooncakeMaster(metadata=False))
    one, other = join(at_end, master.settings, 2)
    other.do("store", "abc")
    one.kill()
    (third,) = join(at_end, master.settings, 1)
    await_sharing(other, third, texts())
    await_sharing(third, other, texts())


def test_a_record_that_is_lost_with_its_nodes_is_written_again(at_end: ExitStack) -> None:
    master = at_end.enter_context(MooncakeMaster(metadata=False))
    # The one that goes on has read the record and lends no memory.
    (lender,) = join(at_end, master.settings, 1)
    (one,) = join(at_end, master.settings | {"mooncake_segment_gb": 0}, 1)
    fresh = texts()
    await_sharing(one, lender, fresh)
    lender.end()
    (other,) = join(at_end, master.settings, 1)
    await_sharing(one, other, fresh)
    await_sharing(other, one, fresh)


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd: apt-get install etcd-server")
def test_nodes_go_on_with_another_master_that_etcd_names(at_end: ExitStack) -> None:
    etcd = at_end.enter_context(Etcd())
    masters = [at_end.enter_context(MooncakeMaster(metadata=False, etcd=etcd)) for _ in range(2)]
    one, other = join(at_end, masters[0].settings, 2)
    fresh = texts()
    await_sharing(one, other, fresh)
    masters[0].kill()
    # The other master knows no object, not even the record.
    await_sharing(one, other, fresh)
    (third,) = join(at_end, masters[0].settings, 1)
    await_sharing(other, third, fresh)
    await_sharing(third, one, fresh)
