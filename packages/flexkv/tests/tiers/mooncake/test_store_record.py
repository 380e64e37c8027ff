# SPDX-License-Identifier: Apache-2.0
"""The record of the epoch in a real Mooncake Store without a metadata server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest

pytest.importorskip(
    "mooncake.store",
    reason="Mooncake Store is not installed: pip install 'flexkv[mooncake]', apt-get install "
    "libibverbs1 librdmacm1 libnuma1",
    exc_type=ImportError,
)

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from shared_node import FINGERPRINT

from flexkv.settings import CacheConfig
from flexkv.tiers.mooncake.member import NO_SPACE
from flexkv.tiers.mooncake.open_mooncake import open_record as mooncake_record
from flexkv.tiers.mooncake.store_record import StoreRecord
from integration.harness.mooncake_master import MooncakeMaster
from packages.patience import wait_until

MIB = 1 << 20
NODES = 4
LIMIT_SECONDS = 5.0


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster(metadata=False) as master:
        yield master


@pytest.fixture
def lend(master: MooncakeMaster) -> Iterator[Callable[[], MooncakeDistributedStore]]:
    with contextlib.ExitStack() as ending:

        def make() -> MooncakeDistributedStore:
            client = MooncakeDistributedStore()
            address = master.settings["mooncake_master"]
            assert client.setup("127.0.0.1", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", address) == 0
            ending.callback(client.close)
            return client

        yield make


def open_record(master: MooncakeMaster) -> StoreRecord:
    address = master.settings["mooncake_master"]
    config = CacheConfig(
        mooncake_master=address,
        mooncake_metadata="P2PHANDSHAKE",
        mooncake_timeout_seconds=LIMIT_SECONDS,
    )
    return mooncake_record(config, FINGERPRINT)


def test_of_many_that_create_it_at_once_one_wins(
    master: MooncakeMaster, lend: Callable[[], MooncakeDistributedStore]
) -> None:
    lend()
    records = [open_record(master) for _ in range(NODES)]
    assert [each.read() for each in records] == [None] * NODES
    with ThreadPoolExecutor(NODES) as pool:
        list(pool.map(lambda i: records[i].create(b"record %d" % i), range(NODES)))
    (found,) = {each.read() for each in records}
    assert found is not None
    records[0].create(b"too late")
    assert records[1].read() == found
    records[2].replace(b"replaced")
    assert {each.read() for each in records} == {b"replaced"}


def test_without_lent_memory_the_error_says_so(master: MooncakeMaster) -> None:
    with pytest.raises(OSError, match="no node of the Mooncake Store lends memory"):
        open_record(master).create(b"record")


def test_a_full_store_evicts_blocks_and_not_the_record(
    master: MooncakeMaster, lend: Callable[[], MooncakeDistributedStore]
) -> None:
    client = lend()
    record = open_record(master)
    record.create(b"record")
    codes = {client.put(f"block {i}", b"x" * MIB) for i in range(64)}
    assert codes == {0, NO_SPACE}
    assert record.read() == b"record"


def test_each_node_that_lends_memory_keeps_a_copy(
    master: MooncakeMaster, lend: Callable[[], MooncakeDistributedStore]
) -> None:
    first = lend()
    open_record(master).create(b"record")
    later = lend()
    record = StoreRecord(lambda: later, ReplicateConfig(), FINGERPRINT, lends=True)
    assert record.read() == b"record"
    wait_until(lambda: len(later.get_replica_desc(f"flexkv/epochs/{FINGERPRINT}")) == 2)
    first.close()
    assert record.read() == b"record"
    assert open_record(master).read() == b"record"


def test_a_master_that_is_gone_is_no_missing_record(
    master: MooncakeMaster, lend: Callable[[], MooncakeDistributedStore]
) -> None:
    """A missing record would be written anew, and hide all blocks."""
    lend()
    record = open_record(master)
    record.create(b"record")
    assert record.read() == b"record"
    master.kill()
    with pytest.raises(OSError, match="code -"):
        record.read()
    with pytest.raises(OSError, match="code -"):
        record.replace(b"another")


def test_a_master_that_hangs_is_an_error_in_time(
    master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by its path: another test may have put the package of before back.
    monkeypatch.setattr(import_module("flexkv.tiers.mooncake.join"), "JOIN_SECONDS", 0.5)
    record = open_record(master)
    master.pause()
    with pytest.raises(OSError, match=r"not be joined within 0\.5 s"):
        record.read()
    master.go_on()
