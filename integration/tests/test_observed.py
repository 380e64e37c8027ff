# SPDX-License-Identifier: Apache-2.0
"""What a router and an operator see of a real server: KV events on a socket, and `/metrics`."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from integration.harness.config import EngineConfig
from integration.harness.host import EngineHost
from integration.harness.server import Server
from integration.tests import disks
from integration.tests.corpus import ENGINE_BLOCK, FLEXKV_BLOCK, SHORT, Tokens, tokens
from integration.tests.disks import SLOTS
from integration.tests.steps import whole_blocks

PROMPTS = tuple(tokens(f"observed {i}", 15 * FLEXKV_BLOCK + 7) for i in range(12))
"""More than host memory holds, and no block twice."""
BLOCKS = sum(len(prompt) // FLEXKV_BLOCK for prompt in PROMPTS)
HOST, DISK = "CPU", "STORAGE"
WAIT_SECONDS = 600.0
"""For what hangs."""
_marks = itertools.count()


class Router:
    """Subscribes to an engine's KV events, and keeps what it was told: the tokens of each
    FlexKV block by the hash of its end, for each of FlexKV's media. As in the indexes of routers,
    `AllBlocksCleared` clears all media."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.told: dict[str, dict[Any, Tokens]] = {HOST: {}, DISK: {}}
        self._cleared: dict[str, set[Any]] = {HOST: set(), DISK: set()}
        self._tokens: dict[Any, Tokens] = {}  # of all blocks that were ever told in full
        self._batches = 0
        self._computed: set[Tokens] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)

    def await_server(self) -> None:
        """Wait until what an engine tells from now on is heard: ZeroMQ tries to connect ten times a
        second, and what is told before is lost."""
        assert self._monitor.poll(timeout=int(1000 * WAIT_SECONDS)), "nobody publishes events"

    def listen(self, mark: Tokens) -> None:
        """Take in all that the engine told up to when it computed the one block `mark`."""
        while mark not in self._computed:
            assert self._socket.poll(timeout=int(1000 * WAIT_SECONDS)), "nothing more is told"
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == self._batches, "a batch is missing"
            self._batches += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            for medium, blocks in self.told.items():
                self._cleared[medium].update(blocks)
                blocks.clear()
            return
        medium = event.get("medium") or ""
        told = self.told.get(medium)
        if told is None:  # of vLLM's own cache
            if event["type"] == "BlockStored":
                self._computed.add(tuple(event["token_ids"]))
            return
        hashes, cleared = event["block_hashes"], self._cleared[medium]
        if event["type"] == "BlockRemoved":
            for each in hashes:
                assert each in told or each in cleared, "was never told"
                told.pop(each, None)
                cleared.discard(each)
            return
        assert event["type"] == "BlockStored"
        assert event["group_idx"] == 0
        if event["block_size"]:
            assert event["block_size"] == len(event["token_ids"]) == FLEXKV_BLOCK
            (named,) = hashes
            self._tokens[named] = tuple(event["token_ids"])
        for each in hashes:  # those of the disk are told again without their tokens
            assert each not in told
            assert event["block_size"] or each in cleared
            cleared.discard(each)
            told[each] = self._tokens[each]

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


class Scrape:
    """One scrape, parsed as Prometheus does it."""

    def __init__(self, text: str) -> None:
        self._samples = [
            each for family in text_string_to_metric_families(text) for each in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        (found,) = self.values(name, **labels)
        return found

    def values(self, name: str, **labels: str) -> list[float]:
        return [
            float(each.value)
            for each in self._samples
            if each.name == f"vllm:{name}" and labels.items() <= each.labels.items()
        ]


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with tempfile.TemporaryDirectory(prefix="flexkv-test-") as folder:
        made = Router(f"ipc://{folder}/events")
        yield made
        made.close()


@pytest.fixture(scope="module")
def server(
    host: EngineHost,
    disk_config: Callable[..., EngineConfig],
    work_dir: Path,
    router: Router,
) -> Iterator[Server]:
    host.close()  # one engine at a time
    config = disk_config(work_dir / "observed-disk", probe=False)
    with Server(config, work_dir / "logs" / "server.log", router.endpoint) as made:
        router.await_server()
        yield made


def settle(server: Server, router: Router) -> Scrape:
    """Wait until nothing is on its way any more, and all that was is told."""
    deadline = time.monotonic() + WAIT_SECONDS
    queues = [1.0]
    while any(queues):
        assert time.monotonic() < deadline, queues
        server.generate(SHORT, 3)
        queues = Scrape(server.metrics()).values("flexkv_queue_length")
        assert queues
    # Workers tell what they copied a step later. And one block of vLLM's own, told after the rest.
    mark = tokens(f"mark {next(_marks)}", ENGINE_BLOCK + 1)
    server.generate(mark, 3)
    router.listen(mark[:ENGINE_BLOCK])
    return Scrape(server.metrics())


def blocks_of(prompt: Tokens) -> set[Tokens]:
    """A prompt's FlexKV blocks."""
    stop = whole_blocks(len(prompt))
    return {prompt[i : i + FLEXKV_BLOCK] for i in range(0, stop, FLEXKV_BLOCK)}


def test_a_router_and_an_operator_see_what_is_there(server: Server, router: Router) -> None:
    for prompt in PROMPTS:
        server.generate(prompt)
        seen = settle(server, router)
    all_blocks = set().union(*map(blocks_of, PROMPTS))
    assert set(router.told[DISK].values()) == all_blocks
    assert set(router.told[HOST].values()) < all_blocks
    slots = seen.value("flexkv_capacity_blocks", tier="host")
    assert SLOTS <= slots < BLOCKS
    assert len(router.told[HOST]) == slots
    assert seen.value("flexkv_blocks", tier="host") == slots
    assert seen.value("flexkv_blocks", tier="disk") == BLOCKS
    assert seen.value("flexkv_stored_blocks_total", tier="host") == BLOCKS
    assert seen.value("flexkv_stored_blocks_total", tier="disk") == BLOCKS
    assert seen.value("flexkv_evicted_blocks_total", tier="host") == BLOCKS - slots
    written = BLOCKS * disks.BLOCK_BYTES
    assert seen.value("flexkv_copied_bytes_total", link="device", direction="store") == written
    assert seen.value("flexkv_copied_bytes_total", link="disk", direction="write") == written
    assert seen.value("flexkv_copy_seconds_total", link="disk", direction="write") > 0

    # All that was told can be loaded: one prompt from memory, one from disk.
    first, last = PROMPTS[0], PROMPTS[-1]
    assert blocks_of(last) <= set(router.told[HOST].values())
    assert not blocks_of(first) & set(router.told[HOST].values())
    server.reset_prefix_cache(external=False)
    server.generate(last)
    server.generate(first)
    seen = settle(server, router)
    assert blocks_of(first) <= set(router.told[HOST].values())
    assert set(router.told[DISK].values()) == all_blocks
    assert seen.value("flexkv_hit_tokens_total", tier="host") == whole_blocks(len(last))
    assert seen.value("flexkv_hit_tokens_total", tier="disk") == whole_blocks(len(first))
    hits = whole_blocks(len(last)) + whole_blocks(len(first))
    assert seen.value("external_prefix_cache_hits_total") == hits
    queries = seen.value("external_prefix_cache_queries_total")
    assert seen.value("flexkv_query_tokens_total", tier="host") == queries
    for cause in ("load", "store", "read", "damaged", "stalled", "write", "internal"):
        assert set(seen.values("flexkv_failures_total", cause=cause)) == {0.0}


def test_parameters_of_requests(server: Server, router: Router) -> None:
    before = settle(server, router)
    told = {medium: dict(blocks) for medium, blocks in router.told.items()}
    new = tokens("not stored", 5 * FLEXKV_BLOCK)
    server.reset_prefix_cache(external=False)
    answer = server.generate(PROMPTS[3], 8)
    server.reset_prefix_cache(external=False)
    params = {"flexkv.load": False, "flexkv.store": False, "flexkv.typo": 1, "other": {}}
    after_first = settle(server, router)
    assert server.generate(PROMPTS[3], 8, params) == answer
    server.generate(new, params=params)
    after = settle(server, router)
    hits = "external_prefix_cache_hits_total"
    assert after_first.value(hits) > before.value(hits)
    assert after.value(hits) == after_first.value(hits)
    assert after.value("flexkv_ignored_parameters_total") == 2
    assert "'flexkv.typo': 1, which is ignored; allowed: flexkv.load" in server.log()
    known = set(router.told[DISK].values()) | set(router.told[HOST].values())
    assert not blocks_of(new) & known
    assert set(told[DISK]) == set(router.told[DISK])


def test_a_reset_over_http(server: Server, router: Router) -> None:
    server.generate(PROMPTS[0])
    server.reset_prefix_cache(external=True)
    seen = settle(server, router)
    assert router.told == {HOST: {}, DISK: {}}
    assert seen.value("flexkv_resets_total", cause="request") == 1
    assert seen.value("flexkv_blocks", tier="host") == 0
    assert seen.value("flexkv_blocks", tier="disk") == 0
    hits = seen.value("external_prefix_cache_hits_total")
    server.generate(PROMPTS[0])
    seen = settle(server, router)
    assert seen.value("external_prefix_cache_hits_total") == hits
    assert set(router.told[HOST].values()) == blocks_of(PROMPTS[0])
