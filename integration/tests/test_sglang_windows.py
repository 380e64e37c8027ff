# SPDX-License-Identifier: Apache-2.0
"""A model with sliding windows in a pool of their own, on a real SGLang with FlexKV."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.campaign.counts import Counts
from integration.harness.checkpoint import TINY
from integration.harness.families import write_family
from integration.sglang.linker import linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import Answer, ServerConfig, SglangServer
from integration.tests.sglang_linked import PATIENCE, tokens

ANSWER = 20
PROMPTS = [tokens(f"window {number}", length) for number, length in enumerate((90, 333, 1111))]
"""Shorter than a window, and longer; the last takes several chunks."""

SAID = tokens("said in a window", 70)
POOLS = {"swa_full_tokens_ratio": 0.5}
"""SGLang's pool of windows has half the tokens of the pool of full attention, as for long contexts:
it evicts windows and keeps their prefixes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A server.

    Attributes:
        page: tokens of a page.
        ranks: that share a page.
        flags: of its command line.
    """

    page: int = 16
    ranks: int = 1
    flags: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "pages of 1, in small chunks": Kind(1, flags={"chunked_prefill_size": 128}),
    "pages of 64, without overlap": Kind(64, flags={"disable_overlap_schedule": True}),
    "two ranks": Kind(ranks=2),
}

SPEC = dataclasses.replace(TINY, layers=9)
Start = Callable[..., SglangServer]
StartPlain = Callable[..., PlainServer]


@pytest.fixture(scope="session")
def windowed(work_dir: Path, sglang: Path) -> Path:
    """A model with sliding windows."""
    return write_family("mellum", work_dir, sglang)


def fields(kind: Kind) -> dict[str, Any]:
    """Of the configurations of both servers."""
    return {
        "page_size": kind.page,
        "tensor_parallel_size": kind.ranks,
        "forked": True,
        "flags": POOLS | kind.flags,
    }


@pytest.fixture
def start(tmp_path: Path, windowed: Path) -> Iterator[Start]:
    servers: list[SglangServer] = []

    def make(kind: Kind = Kind(), **settings: str) -> SglangServer:
        own = {"FLEXKV_RUNTIME_DIR": str(tmp_path / "run"), "FLEXKV_ALWAYS_LOAD": "1"}
        config = linker_config(windowed, SPEC, own | settings, **fields(kind))
        servers.append(SglangServer(config, tmp_path / f"{len(servers)}.log"))
        return servers[-1]

    yield make
    for each in servers:
        each.close()


@pytest.fixture
def start_plain(tmp_path: Path, windowed: Path) -> StartPlain:
    def make(kind: Kind = Kind()) -> PlainServer:
        config = ServerConfig(windowed, SPEC, **fields(kind))
        return PlainServer(config, tmp_path / "plain.log")

    return make


def settle(server: SglangServer) -> None:
    deadline = time.monotonic() + PATIENCE
    server.await_steps()
    while Counts(server.metrics(), "sglang:").total("flexkv_queue_length"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pages_of(prompt: list[int], page: int) -> int:
    """Tokens of the whole pages of a prompt, of which SGLang computes the last token at least."""
    return (len(prompt) - 1) // page * page


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_comes_back_with_its_window(
    start: Start, start_plain: StartPlain, name: str
) -> None:
    kind = KINDS[name]
    with start_plain(kind) as plain:
        wanted = [each.tokens for each in plain.generate_all(PROMPTS, ANSWER)]
    server = start(kind, FLEXKV_CPU_CACHE_GB="0.1")
    first = server.generate_all(PROMPTS, ANSWER)
    assert [each.tokens for each in first] == wanted
    assert [each.cached_tokens for each in first] == [0] * len(PROMPTS)
    settle(server)
    server.flush()
    server.overwrite(after_each=lambda: settle(server))
    again = server.generate_all(PROMPTS, ANSWER)
    assert [each.tokens for each in again] == wanted
    assert [each.cached_tokens for each in again] == [pages_of(p, kind.page) for p in PROMPTS]


def test_a_conversation_goes_on_from_the_disk(
    start: Start, start_plain: StartPlain, tmp_path: Path
) -> None:
    """Its second turn begins behind an answer, whose window is the only one that SGLang kept."""
    disk = {
        "FLEXKV_CPU_CACHE_GB": "0.1",
        "FLEXKV_SSD_CACHE_GB": "0.1",
        "FLEXKV_SSD_CACHE_DIR": str(tmp_path / "disk"),
    }
    with start_plain() as plain:
        answers = [plain.generate(prompt, ANSWER) for prompt in PROMPTS]
        turns = [[*p, *a.tokens, *SAID] for p, a in zip(PROMPTS, answers, strict=True)]
        plain.flush()
        wanted = [plain.generate(turn, ANSWER).tokens for turn in turns]

    server = start(**disk)
    assert [server.generate(p, ANSWER).tokens for p in PROMPTS] == [a.tokens for a in answers]
    settle(server)
    server.close()
    server = start(**disk)
    found: list[Answer] = [server.generate(turn, ANSWER) for turn in turns]
    assert [each.tokens for each in found] == wanted
    for answer, prompt in zip(found, PROMPTS, strict=True):
        # SGLang stores the answer, but for its last token.
        assert answer.cached_tokens >= pages_of(prompt, 16)
