# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states, on a real SGLang with FlexKV."""

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
PROMPTS = [tokens(f"state {number}", length) for number, length in enumerate((90, 333, 1111))]
"""The longer ones take several chunks."""

SAID = tokens("said in a state", 70)
FEW = {"max_mamba_cache_size": 64}
"""Unset, SGLang's pool takes 3 GB on a CPU."""
NO_BUFFER = FEW | {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
EXTRA_BUFFER = FEW | {"mamba_radix_cache_strategy": "extra_buffer"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A server.

    Attributes:
        page: tokens of a page.
        ranks: that share a page.
        flags: of its command line.
        env: added to its environment.
    """

    page: int = 16
    ranks: int = 1
    flags: dict[str, Any] = field(default_factory=EXTRA_BUFFER.copy)
    env: dict[str, str] = field(default_factory=dict)


KINDS = {
    "pages of 1, in small chunks": Kind(1, flags=NO_BUFFER | {"chunked_prefill_size": 128}),
    "pages of 16": Kind(16),
    "pages of 64, without overlap": Kind(
        64, flags=EXTRA_BUFFER | {"disable_overlap_schedule": True}
    ),
    "two ranks": Kind(ranks=2),
}

SPEC = dataclasses.replace(TINY, layers=4)
Start = Callable[..., SglangServer]
StartPlain = Callable[..., PlainServer]


@pytest.fixture(scope="session")
def stateful(work_dir: Path, sglang: Path) -> Path:
    """A model with recurrent states."""
    return write_family("qwen3_5", work_dir, sglang)


def fields(kind: Kind) -> dict[str, Any]:
    """Of the configurations of both servers."""
    return {
        "page_size": kind.page,
        "tensor_parallel_size": kind.ranks,
        "forked": not kind.env,  # SGLang reads it when it is imported
        "flags": kind.flags,
    }


@pytest.fixture
def start(tmp_path: Path, stateful: Path) -> Iterator[Start]:
    servers: list[SglangServer] = []

    def make(kind: Kind = Kind(), **settings: str) -> SglangServer:
        own = {"FLEXKV_RUNTIME_DIR": str(tmp_path / "run"), "FLEXKV_ALWAYS_LOAD": "1"}
        config = linker_config(stateful, SPEC, own | settings | kind.env, **fields(kind))
        servers.append(SglangServer(config, tmp_path / f"{len(servers)}.log"))
        return servers[-1]

    yield make
    for each in servers:
        each.close()


@pytest.fixture
def start_plain(tmp_path: Path, stateful: Path) -> StartPlain:
    def make(kind: Kind = Kind()) -> PlainServer:
        config = ServerConfig(stateful, SPEC, env=kind.env, **fields(kind))
        return PlainServer(config, tmp_path / "plain.log")

    return make


def settle(server: SglangServer) -> None:
    deadline = time.monotonic() + PATIENCE
    server.await_steps()
    while Counts(server.metrics(), "sglang:").total("flexkv_queue_length"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_comes_back_with_its_state(
    start: Start, start_plain: StartPlain, name: str
) -> None:
    """As many tokens come back as SGLang's own cache has states for."""
    kind = KINDS[name]
    with start_plain(kind) as plain:
        wanted = [plain.generate(prompt, ANSWER).tokens for prompt in PROMPTS]
        own = [plain.generate(prompt, ANSWER).cached_tokens for prompt in PROMPTS]
    assert own[-1] > own[-2] > 0
    server = start(kind, FLEXKV_CPU_CACHE_GB="0.5")
    first = [server.generate(prompt, ANSWER) for prompt in PROMPTS]
    assert [each.tokens for each in first] == wanted
    assert [each.cached_tokens for each in first] == [0] * len(PROMPTS)
    settle(server)
    server.flush()
    server.overwrite(after_each=lambda: settle(server))
    again = server.generate_all(PROMPTS, ANSWER)
    assert [each.tokens for each in again] == wanted
    assert [each.cached_tokens for each in again] == own


def test_a_state_of_16_bits_comes_back(start: Start, start_plain: StartPlain) -> None:
    """With SGLang's own dtype of the inputs of a convolution, what a prompt gets depends on where
    SGLang begins to compute: FlexKV gives what SGLang's own cache gives."""
    flags = EXTRA_BUFFER | {"dtype": "bfloat16"}
    kind = Kind(flags=flags, env={"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"})
    with start_plain(kind) as plain:
        for prompt in PROMPTS:
            plain.generate(prompt, ANSWER)
        wanted = [plain.generate(prompt, ANSWER) for prompt in PROMPTS]
    assert wanted[-1].cached_tokens > 0
    server = start(kind, FLEXKV_CPU_CACHE_GB="0.5")
    for prompt in PROMPTS:
        server.generate(prompt, ANSWER)
    settle(server)
    server.flush()
    server.overwrite(after_each=lambda: settle(server))
    again = [server.generate(prompt, ANSWER) for prompt in PROMPTS]
    assert [each.tokens for each in again] == [each.tokens for each in wanted]
    assert [each.cached_tokens for each in again] == [each.cached_tokens for each in wanted]


def test_a_conversation_goes_on_from_the_disk(
    start: Start, start_plain: StartPlain, tmp_path: Path
) -> None:
    """Its second turn begins behind an answer, at whose end SGLang kept a state."""
    disk = {
        "FLEXKV_CPU_CACHE_GB": "0.5",
        "FLEXKV_SSD_CACHE_GB": "0.5",
        "FLEXKV_SSD_CACHE_DIR": str(tmp_path / "disk"),
    }
    with start_plain() as plain:
        answers = [plain.generate(prompt, ANSWER) for prompt in PROMPTS]
        turns = [[*p, *a.tokens, *SAID] for p, a in zip(PROMPTS, answers, strict=True)]
        own = [plain.generate(turn, ANSWER) for turn in turns]

    server = start(**disk)
    assert [server.generate(p, ANSWER).tokens for p in PROMPTS] == [a.tokens for a in answers]
    settle(server)
    server.close()
    server = start(**disk)
    found: list[Answer] = [server.generate(turn, ANSWER) for turn in turns]
    assert [each.tokens for each in found] == [each.tokens for each in own]
    assert [each.cached_tokens for each in found] == [each.cached_tokens for each in own]


def test_a_shared_prefix_gets_a_state_of_its_own(start: Start, start_plain: StartPlain) -> None:
    """SGLang makes a state where prompts part, once it has seen that they do. Its prefix is stored
    by then."""
    shared = tokens("shared by states", 700)
    prompts = [[*shared, *tokens(f"own {number}", 150)] for number in range(4)]
    with start_plain() as plain:
        wanted = [plain.generate(prompt, ANSWER) for prompt in prompts]
    server = start(FLEXKV_CPU_CACHE_GB="0.5")
    for prompt in prompts[:-1]:
        server.generate(prompt, ANSWER)
        settle(server)
    server.flush()
    server.overwrite(after_each=lambda: settle(server))
    found = server.generate(prompts[-1], ANSWER)
    assert found.tokens == wanted[-1].tokens
    assert found.cached_tokens == wanted[-1].cached_tokens > 0
