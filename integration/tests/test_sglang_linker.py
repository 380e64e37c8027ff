# SPDX-License-Identifier: Apache-2.0
"""A real SGLang that computes on a CPU, with FlexKV behind `--enable-flexkv`.

A server without FlexKV gives the reference. One with FlexKV has a small arena and a disk. Each slot
of SGLang's KV cache is overwritten before a prompt is asked again, and the first test shows that
wrong bytes would change the tokens.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.campaign.faults import Kind, OrderBook
from integration.harness.checkpoint import TINY
from integration.harness.prompts import random_tokens
from integration.sglang.linker import PAGE_TOKENS, linker_config, orders_in
from integration.sglang.server import Answer, ServerConfig, SglangServer

ARENA_PAGES = 200
ANSWER = 24
LONG_ANSWER = 300
PATIENCE = 60.0
"""Seconds of an order, and of what has to happen, on a machine that others use."""

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
BESIDE = tokens("beside", 400)
TURN = tokens("turn", 180)
SAID = tokens("said", 40)


def pages_of(length: int) -> int:
    """Tokens of the whole pages of a prompt, of which SGLang computes the last token at least."""
    return (length - 1) // PAGE_TOKENS * PAGE_TOKENS


@dataclass
class Plain:
    """Answers of SGLang without FlexKV, each prompt alone and with nothing cached."""

    short: dict[tuple[int, ...], list[int]]
    long: list[int]

    def of(self, prompt: Prompt) -> list[int]:
        return self.short[tuple(prompt)]


@dataclass
class Linked:
    """The server with FlexKV.

    Attributes:
        server: as it runs.
        config: what it was started with.
        orders: what goes wrong in it.
        plain: the reference.
    """

    server: SglangServer
    config: ServerConfig
    orders: OrderBook
    plain: Plain

    def check(self, prompt: Prompt, answer: Answer) -> None:
        assert answer.finish == "length"
        assert answer.tokens == self.plain.of(prompt)

    def ask(self, prompt: Prompt, **request: Any) -> Answer:
        answer = self.server.generate(prompt, ANSWER, **request)
        self.check(prompt, answer)
        return answer

    def forget(self) -> None:
        """SGLang itself has nothing of any prompt, and old bytes nowhere."""
        self.server.flush()
        self.server.overwrite()


def ask_plainly(server: SglangServer) -> Plain:
    turn = [*TURN]
    singles = [WRONG, *WARM, *PARTIAL, *BATCH, FAILED, ABORTED, *MANY, TURN]
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
    server.flush()
    return Plain(short, server.generate(BESIDE, LONG_ANSWER).tokens)


def settings_in(folder: Path, disk: Path) -> dict[str, str]:
    page = TINY.kv_bytes_per_token * PAGE_TOKENS
    return {
        "FLEXKV_CPU_CACHE_GB": f"{ARENA_PAGES * page / (1 << 30):.6f}",
        "FLEXKV_SSD_CACHE_GB": "0.25",
        "FLEXKV_SSD_CACHE_DIR": str(disk),
        "FLEXKV_RUNTIME_DIR": str(folder / "run"),
        "FLEXKV_SSD_TIMEOUT_SECONDS": str(PATIENCE),
        "FLEXKV_ALWAYS_LOAD": "1",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("linker")


@pytest.fixture(scope="module")
def linked(folder: Path, model: Path, sglang: Path) -> Iterator[Linked]:
    orders = orders_in(folder)
    config = linker_config(model, TINY, settings_in(folder, folder / "disk"), folder)
    alone = ServerConfig(model, TINY, page_size=PAGE_TOKENS)

    def ask() -> Plain:
        with SglangServer(alone, folder / "plain.log") as server:
            return ask_plainly(server)

    with ThreadPoolExecutor(1) as pool:
        plain = pool.submit(ask)
        with SglangServer(config, folder / "first.log") as server:
            linked = Linked(server, config, orders, plain.result())
            yield linked
            linked.server.close()


@pytest.mark.proof
def test_wrong_bytes_would_change_the_tokens(linked: Linked) -> None:
    assert linked.ask(WRONG).cached_tokens == 0
    linked.forget()
    linked.orders.give(Kind.LOAD_WRONG, 100, PATIENCE)
    answer = linked.server.generate(WRONG, ANSWER)
    linked.orders.withdraw()
    assert answer.cached_tokens == pages_of(len(WRONG))
    assert answer.tokens != linked.plain.of(WRONG)
    linked.forget()
    assert linked.ask(WRONG).cached_tokens == pages_of(len(WRONG))


def test_warm_after_a_flush(linked: Linked) -> None:
    for prompt in WARM:
        assert linked.ask(prompt).cached_tokens == 0
    linked.forget()
    for prompt in WARM:
        assert linked.ask(prompt).cached_tokens == pages_of(len(prompt))


def test_a_prefix_is_loaded_and_the_rest_computed(linked: Linked) -> None:
    linked.server.generate(SHARED, 1)
    linked.forget()
    found = []
    for prompt in PARTIAL:
        found.append(linked.ask(prompt).cached_tokens)
        linked.server.flush()
    assert found == [0, 0, 16, 192, 400]


def test_the_next_turn_finds_the_answer(linked: Linked) -> None:
    answer = linked.ask(TURN)
    linked.forget()
    turn = [*TURN, *answer.tokens, *SAID]
    # SGLang does not compute the last token of an answer.
    assert linked.ask(turn).cached_tokens == pages_of(len(TURN) + ANSWER)


def test_eight_slow_loads_of_one_batch(linked: Linked) -> None:
    for prompt in BATCH:
        linked.ask(prompt)
    linked.forget()
    linked.orders.give(Kind.LOAD_LATE, 12, PATIENCE)
    answers = linked.server.generate_all(BATCH, ANSWER)
    linked.orders.withdraw()
    assert any(hit.kind is Kind.LOAD_LATE for hit in linked.orders.hits())
    for prompt, answer in zip(BATCH, answers, strict=True):
        linked.check(prompt, answer)
        assert answer.cached_tokens == pages_of(len(prompt))


def test_a_load_that_fails_ends_only_its_request(linked: Linked) -> None:
    linked.ask(FAILED)
    linked.forget()
    linked.orders.give(Kind.LOAD_FAILED, 1, PATIENCE)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(linked.server.generate, BESIDE, LONG_ANSWER)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            linked.server.generate(FAILED, ANSWER)
        assert other.result().tokens == linked.plain.long
    linked.orders.withdraw()
    linked.forget()
    linked.ask(FAILED)
    linked.forget()
    assert linked.ask(FAILED).cached_tokens == pages_of(len(FAILED))


def test_aborts_while_loads_run(linked: Linked) -> None:
    linked.ask(ABORTED)
    for number in range(3):
        linked.forget()
        linked.orders.give(Kind.LOAD_LATE, 4, PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(linked.server.generate, ABORTED, 200, rid=f"abort {number}")
            time.sleep(0.1 * number)
            linked.server.abort(f"abort {number}")
            with contextlib.suppress(urllib.error.HTTPError):  # if it had not begun
                asked.result()
        linked.orders.withdraw()
    linked.forget()
    assert linked.ask(ABORTED).cached_tokens == pages_of(len(ABORTED))


def test_more_than_the_arena_holds(linked: Linked) -> None:
    assert sum(map(len, MANY)) > ARENA_PAGES * PAGE_TOKENS
    for _ in range(2):
        for prompt in MANY:
            linked.ask(prompt)
        linked.forget()
    # What left the arena comes from disk.
    for prompt in MANY:
        assert linked.ask(prompt).cached_tokens == pages_of(len(prompt))
