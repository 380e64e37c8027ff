# SPDX-License-Identifier: Apache-2.0
"""Blocks in a real Mooncake Store, called from several threads."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip(
    "mooncake.store",
    reason="Mooncake Store is not installed: pip install 'flexkv[mooncake]', apt-get install "
    "libibverbs1 librdmacm1 libnuma1",
    exc_type=ImportError,
)

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from shared_node import FINGERPRINT, SLOT, open_tier

from flexkv.host.arena import Arena, ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.tiers import remote
from flexkv.tiers.base import Answer, BlockResult
from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.epochs import Epochs
from flexkv.tiers.job import Outcome, Priority, Result
from flexkv.tiers.mooncake import STORE
from flexkv.tiers.mooncake.member import Member
from flexkv.tiers.mooncake.metadata_record import MetadataRecord
from flexkv.tiers.mooncake.mooncake_store import MooncakeBlocks
from flexkv.tiers.remote import RemoteTier
from integration.harness.mooncake_master import MooncakeMaster
from packages.conftest import PATIENCE_SECONDS
from packages.patience import wait_until

THREADS = 4


class Slowly:
    """A client whose transfers wait until as many are under way as there may be.

    Attributes:
        most: transfers that were under way at once.
    """

    def __init__(self, client: Any, transfers: int) -> None:
        self._client = client
        self._transfers = transfers
        self._changed = threading.Condition()
        self._now = 0
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        return self._counted(call) if name.endswith("_multi_buffers") else call

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            with self._changed:
                self._now += 1
                self.most = max(self.most, self._now)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.most >= self._transfers, PATIENCE_SECONDS)
            time.sleep(0.05)  # time for one too many to come
            result = call(*arguments)
            with self._changed:
                self._now -= 1
            return result

        return counted


@pytest.mark.parametrize("transfers", [1, 2])
def test_so_many_transfers_at_once(transfers: int) -> None:
    arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), THREADS), threads=1)
    views = [arena.slot_view(slot) for slot in range(THREADS)]
    for i, view in enumerate(views):
        view[:] = bytes([i]) * SLOT
    with MooncakeMaster() as master:
        url = master.settings["mooncake_metadata"]
        client = MooncakeDistributedStore()
        address = master.settings["mooncake_master"]
        assert client.setup("127.0.0.1", url, 1 << 24, 1 << 24, "tcp", "", address) == 0
        slowly = Slowly(client, transfers)
        blocks = MooncakeBlocks(
            Member(lambda: slowly),
            ReplicateConfig(),
            slot_bytes=SLOT,
            blocks=THREADS,
            transfers=transfers,
            timeout_seconds=PATIENCE_SECONDS,
        )
        blocks.open()
        blocks.register(arena.address + arena.spec.slots_offset, arena.spec.slots_bytes)

        def move(call: Callable[..., Any]) -> list[Result]:
            with ThreadPoolExecutor(THREADS) as pool:
                done = pool.map(lambda i: call([f"flexkv/{i}"], [views[i]]), range(THREADS))
                return [each[0] for each in done]

        assert move(blocks.put) == [Outcome.DONE] * THREADS
        for view in views:
            view[:] = bytes(SLOT)
        assert move(blocks.get) == [Outcome.DONE] * THREADS
        assert [bytes(view) for view in views] == [bytes([i]) * SLOT for i in range(THREADS)]
        assert slowly.most == transfers
        blocks.close()


class Answering:
    """A client of which one call answers with a code for each object, and does nothing."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.codes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self.codes:
            return getattr(self._client, name)
        return lambda names, *_: [self.codes[name]] * len(names)


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as master:
        yield master


@pytest.fixture
def store(master: MooncakeMaster) -> Iterator[Store]:
    store = Store(master)
    yield store
    store.blocks.close()


class Store:
    """The blocks of a client that answers as the test says, and one block of memory."""

    def __init__(self, master: MooncakeMaster) -> None:
        url = master.settings["mooncake_metadata"]
        client = MooncakeDistributedStore()
        address = master.settings["mooncake_master"]
        assert client.setup("127.0.0.1", url, 1 << 24, 1 << 24, "tcp", "", address) == 0
        self.client = Answering(client)
        self.blocks = MooncakeBlocks(
            Member(lambda: self.client),
            ReplicateConfig(),
            slot_bytes=SLOT,
            blocks=1,
            transfers=1,
            timeout_seconds=PATIENCE_SECONDS,
        )
        self.blocks.open()
        self.arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), 1), threads=1)
        spec = self.arena.spec
        self.blocks.register(self.arena.address + spec.slots_offset, spec.slots_bytes)

    def name(self, key: bytes) -> str:
        return f"flexkv/{FINGERPRINT}/{key.hex()}"

    def put(self, key: bytes) -> Result:
        (result,) = self.blocks.put([self.name(key)], [self.arena.slot_view(0)])
        return result

    def get(self, key: bytes) -> Result:
        (result,) = self.blocks.get([self.name(key)], [self.arena.slot_view(0)])
        return result


@pytest.mark.parametrize("answers", [False, True], ids=["no server", "no HTTP"])
def test_a_failed_metadata_server_keeps_no_buffer(
    store: Store, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    """Without the garbage collector: the memory would live until it happens to run."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"no HTTP")

        port = server.getsockname()[1] if answers else 1
        thread = threading.Thread(target=answer)
        if answers:
            thread.start()
        url = f"http://127.0.0.1:{port}/metadata"
        epochs = Epochs(MetadataRecord(url, FINGERPRINT, PATIENCE_SECONDS))

        def put(buffer: memoryview) -> None:
            epochs.folder("0" * 32)
            store.blocks.put([store.name(b"key")], [buffer])

        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(OSError):
                put(store.arena.slot_view(0))
                raise AssertionError("the record was read")
            store.arena.close()
        finally:
            gc.enable()
        if answers:
            thread.join()
    assert "lives on" not in caplog.text


def test_a_read_that_the_network_ends_removes_no_block(store: Store) -> None:
    assert store.put(b"ended") is Outcome.DONE
    store.client.codes = {"batch_get_into_multi_buffers": -800}
    result = store.get(b"ended")
    assert isinstance(result, OSError)
    assert "code -800" in str(result)
    store.client.codes = {}
    assert store.get(b"ended") is Outcome.DONE


def test_a_read_of_a_block_that_is_being_written_is_a_miss(store: Store) -> None:
    store.client.codes = {"batch_get_into_multi_buffers": -703}
    assert store.get(b"being written") is Outcome.MISSING


@pytest.mark.parametrize("size", [100, 2 * SLOT], ids=["short", "long"])
def test_an_object_of_another_size_is_damaged_and_removed(store: Store, size: int) -> None:
    key = b"of size %d" % size
    assert store.client.put(store.name(key), b"x" * size) == 0
    assert store.get(key) is Outcome.DAMAGED
    assert store.client.batch_is_exist([store.name(key)]) == [0]
    assert store.put(key) is Outcome.DONE


def test_a_block_that_another_client_has_not_completed_is_no_stored_block(store: Store) -> None:
    """Mooncake reports success to all but the first of several writers."""
    store.client.codes = {"batch_put_from_multi_buffers": 0}
    result = store.put(b"of another")
    assert isinstance(result, OSError)
    assert "not complete" in str(result)


@pytest.mark.parametrize(("code", "dropped"), [(-200, True), (-900, False)])
def test_a_write_that_fails_names_its_code(store: Store, code: int, dropped: bool) -> None:
    store.client.codes = {"batch_put_from_multi_buffers": code}
    result = store.put(b"failing")
    if dropped:
        assert result is Outcome.DROPPED
    else:
        assert f"code {code}" in str(result)


def open_mooncake(**settings: Any) -> RemoteTier:
    return open_tier(STORE, **({"mooncake_segment_gb": 1 / 64} | settings))


def test_each_call_of_the_client_has_an_upper_time_unless_the_operator_gave_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"MC_RPC_TIMEOUT_MS": "7"})
    name = ".".join(["a" * 60] * 6)
    tier = open_mooncake(
        mooncake_master=f"{name}:50051",
        mooncake_metadata=f"http://{name}/metadata",
        mooncake_timeout_seconds=6.5,
    )
    assert tier.close()
    assert os.environ == {
        "MC_RPC_TIMEOUT_MS": "7",
        "MC_RPC_CONNECT_TIMEOUT_MS": "6500",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "7",
        "MC_TCP_STATUS_TIMEOUT_SEC": "7",
    }


def test_a_master_that_hangs_fails_questions_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"):
        monkeypatch.delenv(name, raising=False)
    arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), 1), threads=1)
    with MooncakeMaster() as master:
        tier = open_mooncake(**master.settings, mooncake_timeout_seconds=1.0)
        tier.register(arena.address + arena.spec.slots_offset, arena.spec.slots_bytes)
        master.pause()
        ticket = tier.query([b"a" * 32])
        read = tier.read([b"a" * 32], [arena.slot_view(0)], Priority.LOAD)
        answers: list[Answer] = []
        results: list[BlockResult] = []
        while not answers or not results:
            answers += tier.drain_answers()
            results += tier.poll()
            time.sleep(0.001)
        assert answers == [Answer(ticket, None, late=False)]
        assert results == [BlockResult(read, 0, Outcome.FAILED)]
        master.go_on()
        assert tier.close()


def test_a_master_whose_name_leads_nowhere_is_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    name = ".".join(["a" * 60] * 6)  # too long to be asked for, so no resolver is
    tier = open_mooncake(
        mooncake_master=f"{name}:50051", mooncake_metadata=f"http://{name}/metadata"
    )
    assert tier.figures.reads == tier.figures.writes == {CircuitState.CONNECTING: 1}
    assert not tier.readable
    assert tier.close()
    (line,) = [each.getMessage() for each in caplog.records]
    assert f"mooncake_master {name}:50051 or " in line
    assert "cannot be used ([Errno " in line
    assert "Traceback" not in capfd.readouterr().err


def test_a_master_that_comes_after_the_start_is_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Mooncake waits for its master, and fails without its metadata server."""
    monkeypatch.setattr(remote, "OPEN_SECONDS", 0.05)
    with MooncakeMaster() as master:
        master.kill()
        tier = open_mooncake(**master.settings)
        arena = Arena.create(ArenaSpec(BlockFormat(1, (SLOT,)), 1), threads=1)
        spec = arena.spec
        tier.register(arena.address + spec.slots_offset, spec.slots_bytes)
        keys, buffers = [b"late"], [arena.slot_view(0)]
        tier.write(keys, buffers)
        assert [each.outcome for each in tier.poll()] == [Outcome.DROPPED]
        assert "cannot be used (" in caplog.text
        master.restart()
        wait_until(lambda: tier.readable)
        tier.write(keys, buffers)
        results: list[BlockResult] = []
        wait_until(lambda: results, lambda: results.extend(tier.poll()))
        assert [each.outcome for each in results] == [Outcome.DONE]
        assert tier.close()


def test_a_client_that_joins_after_the_end_is_closed_and_gets_no_memory() -> None:
    """The memory may be gone."""
    calls: list[str] = []
    joined = threading.Event()

    class Late:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append(name)

    def join() -> Any:
        assert joined.wait(PATIENCE_SECONDS)
        return Late()

    blocks = MooncakeBlocks(
        Member(join),
        None,
        slot_bytes=SLOT,
        blocks=1,
        transfers=1,
        timeout_seconds=PATIENCE_SECONDS,
    )
    blocks.close()
    joined.set()
    with pytest.raises(OSError, match="was closed while it was joined"):
        blocks.open()
    assert calls == ["close"]
