# SPDX-License-Identifier: Apache-2.0
"""A real SGLang with FlexKV behind `--enable-flexkv`, one server after another on a disk, and
what SGLang answers without FlexKV."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from integration.campaign.counts import Counts
from integration.campaign.faults import Kind as Fault
from integration.campaign.faults import OrderBook
from integration.harness.checkpoint import TINY
from integration.harness.prompts import random_tokens
from integration.sglang.linker import PAGE_TOKENS, linker_config, orders_in
from integration.sglang.server import Answer, ServerConfig, SglangClient, SglangServer

ARENA_PAGES = 200
PAGE_BYTES = TINY.kv_bytes_per_token * PAGE_TOKENS
ANSWER = 24
LONG_ANSWER = 300
PATIENCE = 300.0
"""Seconds of an order, and of what has to happen, on a machine that others use."""

EAGER = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
"""SGLang keeps room for so many tokens of an answer when it admits a request. Where answers become
longer than the room, it takes requests out of the running batch. It reads this when it is imported,
so that a forked server cannot have it."""

HOST, DISK = "CPU_PINNED", "DISK"
"""SGLang's names of the media of FlexKV's tiers."""

Prompt = list[int]


def tokens(seed: str, length: int) -> Prompt:
    return random_tokens(f"linker {seed}", length, TINY.vocab)


WRONG = tokens("wrong", 300)
WARM = [tokens(f"warm {length}", length) for length in (PAGE_TOKENS, 17, 250, 1100)]
SHARED = tokens("shared", 400)
PARTIAL = [SHARED[:kept] + tokens(f"partial {kept}", 150) for kept in (0, 15, 16, 200, 400)]
BATCH = [tokens(f"batch {number}", 200 + 10 * number) for number in range(8)]
FAILED = tokens("failed", 300)
ABORTED = tokens("aborted", 500)
MANY = [tokens(f"many {number}", 900) for number in range(5)]
OWNED = tokens("owned", 330)
LATE = [tokens(f"late {number}", 700) for number in range(2)]
BESIDE = tokens("beside", 400)
CROWD = [tokens(f"crowd {number}", length) for number, length in enumerate((640,) * 4 + (1440,))]
"""SGLang's KV cache has room for these prompts together, but not for their answers too."""
TURN = tokens("turn", 180)
SAID = tokens("said", 40)


def pages_of(length: int) -> int:
    """Tokens of the whole pages of a prompt, of which SGLang computes the last token at least."""
    return (length - 1) // PAGE_TOKENS * PAGE_TOKENS


def settle(server: SglangServer) -> None:
    """Wait until all that was stored has its place in the lowest tier.

    What is being written keeps its place in host memory, and what finds none there is not cached:
    with a slow disk it would be a matter of luck what is known in the end.
    """
    deadline = time.monotonic() + PATIENCE
    server.await_steps()
    while Counts(server.metrics(), "sglang:").total("flexkv_queue_length"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def forget(server: SglangServer) -> None:
    """SGLang itself has nothing of any prompt, and old bytes nowhere; FlexKV has it all."""
    settle(server)
    server.flush()
    server.overwrite(after_each=lambda: settle(server))


@dataclass
class Plain:
    """Answers of SGLang without FlexKV, each prompt alone and with nothing cached."""

    short: dict[tuple[int, ...], list[int]]
    long: dict[tuple[int, ...], list[int]]

    def of(self, prompt: Prompt) -> list[int]:
        return self.short[tuple(prompt)]

    def long_of(self, prompt: Prompt) -> list[int]:
        return self.long[tuple(prompt)]


def ask_plainly(server: SglangClient) -> Plain:
    turn = [*TURN]
    singles = [WRONG, *WARM, *PARTIAL, *BATCH, FAILED, ABORTED, *MANY, *LATE, *CROWD, OWNED, TURN]
    short = {}
    for prompt in singles:
        server.flush()
        answer = server.generate(prompt, ANSWER)
        assert answer.cached_tokens == 0
        short[tuple(prompt)] = answer.tokens
        if prompt == TURN:
            turn = [*TURN, *answer.tokens, *SAID]
    server.flush()
    short[tuple(turn)] = server.generate(turn, ANSWER).tokens
    long = {}
    server.flush()
    long[tuple(BESIDE)] = server.generate(BESIDE, LONG_ANSWER).tokens
    return Plain(short, long)


class Router:
    """Keeps what KV events say of FlexKV's tiers.

    Attributes:
        endpoint: where it listens to the server.
        told: the tokens of each page by its hash, for each medium.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flexkv-test-")  # a short path
        self.endpoint = f"ipc://{self._folder.name}/events"
        self.told: dict[str, dict[int, tuple[int, ...]]] = {HOST: {}, DISK: {}}
        self._context = zmq.Context()
        self._socket = self._connect()

    def listen(self) -> None:
        """Take in all that has been told."""
        while self._socket.poll(timeout=0):
            payload = self._socket.recv_multipart()[-1]
            for event in msgspec.msgpack.decode(payload)[1]:
                self._take(event)

    def knows(self, prompt: Prompt) -> bool:
        """Whether the whole pages of a prompt were told, in one medium or the other."""
        return not self.unknown(prompt)

    def unknown(self, prompt: Prompt) -> list[int]:
        """Which whole pages of a prompt were told in no medium."""
        known = {page for told in self.told.values() for page in told.values()}
        starts = range(0, pages_of(len(prompt)), PAGE_TOKENS)
        pages = [tuple(prompt[start : start + PAGE_TOKENS]) for start in starts]
        return [number for number, page in enumerate(pages) if page not in known]

    def forget(self) -> None:
        """Another server starts.

        A socket that has lost a server subscribes again only when it is next read: until then it
        would miss what the new server tells.
        """
        self._socket.close(linger=0)
        self._socket = self._connect()
        for told in self.told.values():
            told.clear()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        socket.set_hwm(0)  # nothing is dropped until a test reads it
        socket.subscribe(b"")
        socket.connect(self.endpoint)
        return socket

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            for told in self.told.values():
                told.clear()
            return
        told = self.told.get(event["medium"], {})  # what is told of the device is not kept
        for i, number in enumerate(event["block_hashes"]):
            if event["type"] == "BlockRemoved":
                told.pop(number, None)
                continue
            assert event["block_size"] == PAGE_TOKENS
            told[number] = tuple(event["token_ids"][i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS])


class Linked:
    """Servers with FlexKV, one at a time, which share a disk.

    Args:
        folder: for logs, orders and the disk.
        model: that they serve.
        flags: of their command lines, beside those of KV events.

    Attributes:
        server: the one that runs.
        orders: what goes wrong in it.
        router: that it publishes KV events to.
        plain: the reference; set by whoever asks for it.
    """

    server: SglangServer
    plain: Plain

    def __init__(
        self, folder: Path, model: Path, flags: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.orders: OrderBook = orders_in(folder)
        self._folder = folder
        self._starts = 0
        self.router = Router()
        events = {"publisher": "zmq", "endpoint": self.router.endpoint}
        flags = {"kv_events_config": events, **flags}
        self._config = linker_config(model, TINY, self._settings(), folder, flags=flags)

    def start(self, env: Mapping[str, str] | None = None, **changes: Any) -> None:
        """Start a server; `env` is added to its environment, `changes` are of its configuration."""
        changes["env"] = {**self._config.env, **(env or {})}
        self._start(dataclasses.replace(self._config, **changes))

    def restart(self) -> None:
        """Kill the server, once all that was stored is on disk, and start it again."""
        self.settle()
        self.server.kill()
        self._start(self.server.config)

    def _start(self, config: ServerConfig) -> None:
        self._starts += 1
        self.router.forget()
        try:
            self.server = SglangServer(config, self._folder / f"{self._starts}.log")
        except BaseException:
            self.router.close()  # an open socket would hang the tests when it is collected
            raise

    def check(self, prompt: Prompt, answer: Answer) -> None:
        assert answer.finish == "length"
        assert answer.tokens == self.plain.of(prompt)

    def ask(self, prompt: Prompt, **request: Any) -> Answer:
        answer = self.server.generate(prompt, ANSWER, **request)
        self.check(prompt, answer)
        self.settle()
        return answer

    def check_all(self, prompts: list[Prompt]) -> None:
        """All pages of the prompts come back, and they are right."""
        for prompt in prompts:
            self.forget()
            assert self.ask(prompt).cached_tokens == pages_of(len(prompt))

    def check_batch(self, answers: list[Answer]) -> None:
        """The answers to `BATCH` are right, and all pages came from FlexKV."""
        for prompt, answer in zip(BATCH, answers, strict=True):
            self.check(prompt, answer)
            assert answer.cached_tokens == pages_of(len(prompt))

    def answer_to_wrong_bytes(self, prompt: Prompt, copies: int) -> Answer:
        """What the server answers if so many copies of its load move other bytes."""
        self.orders.give(Fault.LOAD_WRONG, copies, PATIENCE)
        answer = self.server.generate(prompt, ANSWER)
        self.orders.withdraw()
        assert answer.tokens != self.plain.of(prompt)
        return answer

    def fail_load(self, prompt: Prompt) -> None:
        """A load of the prompt fails, which ends the request."""
        self.orders.give(Fault.LOAD_FAILED, 1, PATIENCE)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            self.server.generate(prompt, ANSWER)
        self.orders.withdraw()

    def fail_load_beside(self, prompt: Prompt) -> None:
        """As `fail_load`, while the server answers another request."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self.server.generate, BESIDE, LONG_ANSWER)
            self.fail_load(prompt)
            assert other.result().tokens == self.plain.long_of(BESIDE)

    def clear(self) -> None:
        """Drop all that SGLang and FlexKV have."""
        self.server.flush()
        self.server.ask("/hicache/storage-backend/clear", {})
        self.settle()
        assert self.figure("blocks", tier="host") == self.figure("blocks", tier="disk") == 0

    def forget(self) -> None:
        forget(self.server)

    def figures(self) -> Iterator[Sample]:
        """FlexKV's figures."""
        for family in text_string_to_metric_families(self.server.metrics()):
            yield from (each for each in family.samples if ":flexkv_" in each.name)

    def figure(self, name: str, **labels: str) -> float:
        (found,) = (
            float(each.value)
            for each in self.figures()
            if each.name == f"sglang:flexkv_{name}" and labels.items() <= each.labels.items()
        )
        return found

    def settle(self) -> None:
        settle(self.server)

    def close(self) -> None:
        self.server.close()
        self.router.close()

    def _settings(self) -> dict[str, str]:
        return {
            "FLEXKV_CPU_CACHE_GB": f"{ARENA_PAGES * PAGE_BYTES / (1 << 30):.6f}",
            "FLEXKV_SSD_CACHE_GB": "0.25",
            "FLEXKV_SSD_CACHE_DIR": str(self._folder / "disk"),
            "FLEXKV_RUNTIME_DIR": str(self._folder / "run"),
            "FLEXKV_SSD_TIMEOUT_SECONDS": str(PATIENCE),
            "FLEXKV_ALWAYS_LOAD": "1",
        }


def plain_config(model: Path) -> ServerConfig:
    return ServerConfig(model, TINY, page_size=PAGE_TOKENS, forked=True)
