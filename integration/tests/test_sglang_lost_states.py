# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states on a real SGLang, without FlexKV: a lost state changes the tokens.
Otherwise such a model could not show what FlexKV restores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration.harness.checkpoint import TINY
from integration.harness.families import write_family
from integration.sglang import lost_states
from integration.sglang.lost_states import Part
from integration.sglang.server import ServerConfig, SglangServer
from integration.tests.sglang_linked import tokens

ANSWER = 20
PROMPT = tokens("state", 1111)
CHUNK = 256
STATE_TOKENS = 64
"""SGLang keeps a state at the last multiple of so many tokens of a chunk, or else at its end."""


@dataclass(frozen=True, slots=True)
class States:
    """Where a server keeps states.

    Attributes:
        page: tokens of a page.
        hit: tokens of a prompt of so many that its prefix cache has a state for.
        flags: of its command line.
    """

    page: int
    hit: Callable[[int], int]
    flags: dict[str, Any] = field(default_factory=dict)


def at_a_chunk(length: int) -> int:
    return (length - 1) // CHUNK * CHUNK


def at_a_multiple(length: int) -> int:
    return (length - 1) // STATE_TOKENS * STATE_TOKENS


KINDS = {
    "at the end of chunks": States(1, at_a_chunk, {"disable_overlap_schedule": True}),
    "within chunks": States(1, at_a_multiple),
    "within chunks, pages of 16": States(16, at_a_multiple),
}


@pytest.fixture(scope="session")
def recurrent(work_dir: Path, sglang: Path) -> Path:
    """A model with recurrent states."""
    return write_family("qwen3_5", work_dir, sglang)


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, recurrent: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SglangServer, States, Path]]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("states")
    config = ServerConfig(
        recurrent,
        dataclasses.replace(TINY, layers=4),
        page_size=kind.page,
        chunked_prefill=CHUNK,
        forked=True,
        flags={"max_mamba_cache_size": 64, **kind.flags},
        env=lost_states.install(folder),
    )
    with SglangServer(config, folder / "log") as server:
        yield server, kind, folder


@pytest.mark.parametrize("part", ["conv", "temporal"])
def test_a_lost_state_changes_the_tokens(
    served: tuple[SglangServer, States, Path], part: Part
) -> None:
    server, kind, folder = served
    prompt = PROMPT
    server.flush()
    right = server.generate(prompt, ANSWER)
    lost_states.lose(folder, part)
    wrong = server.generate(prompt, ANSWER)
    lost_states.lose(folder, part, lost=False)
    assert wrong.cached_tokens == kind.hit(len(prompt))
    assert wrong.tokens != right.tokens
    server.flush()
    assert server.generate(prompt, ANSWER).tokens == right.tokens
