# SPDX-License-Identifier: Apache-2.0
"""A model with sliding windows in a pool of their own, on a real SGLang with FlexKV."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness.checkpoint import TINY
from integration.harness.families import write_family
from integration.tests.sglang_kinds import ANSWER, Kind, Servers
from integration.tests.sglang_linked import forget, tokens

PROMPTS = [tokens(f"window {number}", length) for number, length in enumerate((90, 333, 1111))]
"""Shorter than a window, and longer; the last takes several chunks."""

SAID = tokens("said in a window", 70)
POOLS = {"swa_full_tokens_ratio": 0.5}
"""SGLang's pool of windows has half the tokens of the pool of full attention, as for long contexts:
it evicts windows and keeps their prefixes."""

KINDS = {
    "pages of 1, in small chunks": Kind(1, flags=POOLS | {"chunked_prefill_size": 128}),
    "pages of 64, without overlap": Kind(64, flags=POOLS | {"disable_overlap_schedule": True}),
    "two ranks": Kind(ranks=2, flags=POOLS),
}


@pytest.fixture(scope="session")
def windowed(work_dir: Path, sglang: Path) -> Path:
    """A model with sliding windows."""
    return write_family("mellum", work_dir, sglang)


@pytest.fixture
def servers(tmp_path: Path, windowed: Path) -> Iterator[Servers]:
    made = Servers(tmp_path, windowed, dataclasses.replace(TINY, layers=9), "0.1")
    yield made
    made.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_comes_back_with_its_window(servers: Servers, name: str) -> None:
    kind = KINDS[name]
    with servers.plain(kind) as plain:
        wanted = [each.tokens for each in plain.generate_all(PROMPTS, ANSWER)]
    server = servers.start(kind)
    first = server.generate_all(PROMPTS, ANSWER)
    assert [each.tokens for each in first] == wanted
    assert [each.cached_tokens for each in first] == [0] * len(PROMPTS)
    forget(server)
    again = server.generate_all(PROMPTS, ANSWER)
    assert [each.tokens for each in again] == wanted
    assert [each.cached_tokens for each in again] == list(map(kind.pages_of, PROMPTS))


def test_a_conversation_goes_on_from_the_disk(servers: Servers) -> None:
    """Its second turn begins behind an answer, whose window is the only one that SGLang kept."""
    kind = Kind(flags=POOLS)
    turns = servers.second_turns(kind, PROMPTS, SAID, flush=True)
    for (answer, _), prompt in zip(turns, PROMPTS, strict=True):
        # SGLang stores the answer, but for its last token.
        assert answer.cached_tokens >= kind.pages_of(prompt)
