# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states, on a real SGLang with FlexKV."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness.checkpoint import TINY
from integration.harness.families import write_family
from integration.tests.sglang_kinds import ANSWER, Kind, Servers
from integration.tests.sglang_linked import forget, settle, tokens

PROMPTS = [tokens(f"state {number}", length) for number, length in enumerate((90, 333, 1111))]
"""The longer ones take several chunks."""

SAID = tokens("said in a state", 70)
FEW = {"max_mamba_cache_size": 64}
"""Unset, SGLang's pool takes 3 GB on a CPU."""
NO_BUFFER = FEW | {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
EXTRA_BUFFER = FEW | {"mamba_radix_cache_strategy": "extra_buffer"}

USUAL = Kind(flags=EXTRA_BUFFER)
KINDS = {
    "pages of 1, in small chunks": Kind(1, flags=NO_BUFFER | {"chunked_prefill_size": 128}),
    "pages of 16": USUAL,
    "pages of 64, without overlap": Kind(
        64, flags=EXTRA_BUFFER | {"disable_overlap_schedule": True}
    ),
    "two ranks": Kind(ranks=2, flags=EXTRA_BUFFER),
}


@pytest.fixture(scope="session")
def stateful(work_dir: Path, sglang: Path) -> Path:
    """A model with recurrent states."""
    return write_family("qwen3_5", work_dir, sglang)


@pytest.fixture
def servers(tmp_path: Path, stateful: Path) -> Iterator[Servers]:
    made = Servers(tmp_path, stateful, dataclasses.replace(TINY, layers=4), "0.5")
    yield made
    made.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_comes_back_with_its_state(servers: Servers, name: str) -> None:
    """As many tokens come back as SGLang's own cache has states for."""
    kind = KINDS[name]
    with servers.plain(kind) as plain:
        wanted = [plain.generate(prompt, ANSWER).tokens for prompt in PROMPTS]
        own = [plain.generate(prompt, ANSWER).cached_tokens for prompt in PROMPTS]
    assert own[-1] > own[-2] > 0
    server = servers.start(kind)
    first = [server.generate(prompt, ANSWER) for prompt in PROMPTS]
    assert [each.tokens for each in first] == wanted
    assert [each.cached_tokens for each in first] == [0] * len(PROMPTS)
    forget(server)
    again = server.generate_all(PROMPTS, ANSWER)
    assert [each.tokens for each in again] == wanted
    assert [each.cached_tokens for each in again] == own


def test_a_state_of_16_bits_comes_back(servers: Servers) -> None:
    """With SGLang's own dtype of the inputs of a convolution, what a prompt gets depends on where
    SGLang begins to compute: FlexKV gives what SGLang's own cache gives."""
    flags = EXTRA_BUFFER | {"dtype": "bfloat16"}
    kind = Kind(flags=flags, env={"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"})
    with servers.plain(kind) as plain:
        for prompt in PROMPTS:
            plain.generate(prompt, ANSWER)
        wanted = [plain.generate(prompt, ANSWER) for prompt in PROMPTS]
    assert wanted[-1].cached_tokens > 0
    server = servers.start(kind)
    for prompt in PROMPTS:
        server.generate(prompt, ANSWER)
    forget(server)
    again = [server.generate(prompt, ANSWER) for prompt in PROMPTS]
    assert [each.tokens for each in again] == [each.tokens for each in wanted]
    assert [each.cached_tokens for each in again] == [each.cached_tokens for each in wanted]


def test_a_conversation_goes_on_from_the_disk(servers: Servers) -> None:
    """Its second turn begins behind an answer, at whose end SGLang kept a state."""
    for found, own in servers.second_turns(USUAL, PROMPTS, SAID):
        assert found.cached_tokens == own.cached_tokens


def test_a_shared_prefix_gets_a_state_of_its_own(servers: Servers) -> None:
    """SGLang makes a state where prompts part, once it has seen that they do. Its prefix is stored
    by then."""
    shared = tokens("shared by states", 700)
    prompts = [[*shared, *tokens(f"own {number}", 150)] for number in range(4)]
    with servers.plain(USUAL) as plain:
        wanted = [plain.generate(prompt, ANSWER) for prompt in prompts]
    server = servers.start(USUAL)
    for prompt in prompts[:-1]:
        server.generate(prompt, ANSWER)
        settle(server)
    forget(server)
    found = server.generate(prompts[-1], ANSWER)
    assert found.tokens == wanted[-1].tokens
    assert found.cached_tokens == wanted[-1].cached_tokens > 0
