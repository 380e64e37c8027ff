# SPDX-License-Identifier: Apache-2.0
"""Kinds of requests to a real SGLang: each gets the same with FlexKV as without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness.checkpoint import TINY
from integration.sglang.linker import PAGE_TOKENS, linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import ServerConfig, SglangClient, SglangServer
from integration.tests.sglang_linked import forget, pages_of, tokens

ANSWER = 16
PROMPT = tokens("kinds of requests", 333)
SAID = tokens("said in a session", 60)
SAMPLING = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
UNSCORED = 200
"""Tokens of a prompt that need no log probability, and may come from a cache."""

Result = tuple[Any, int]
"""What a request got, and how many tokens of its prompt were not computed."""


def generate(server: SglangClient, **body: Any) -> Any:
    return json.loads(server.ask("/generate", {"sampling_params": SAMPLING, **body}))


def scored(server: SglangClient) -> Result:
    """Log probabilities of the prompt's tokens."""
    fields = {"return_logprob": True, "logprob_start_len": UNSCORED}
    answer = generate(server, input_ids=PROMPT, **fields)
    meta = answer["meta_info"]
    scores = [each[0] for each in meta["input_token_logprobs"]]
    named = [each[1] for each in meta["input_token_logprobs"]]
    assert len(scores) == len(PROMPT) - UNSCORED
    rounded = [None if each is None else round(each, 2) for each in scores]
    return (answer["output_ids"], named, rounded), meta["cached_tokens"]


def several(server: SglangClient) -> Result:
    """Three answers (`n`)."""
    answers = generate(server, input_ids=PROMPT, sampling_params=SAMPLING | {"n": 3})
    assert len(answers) == 3
    cached = min(each["meta_info"]["cached_tokens"] for each in answers)
    return [each["output_ids"] for each in answers], cached


def in_a_session(server: SglangClient) -> Result:
    """Two turns of a session, of which the second names the first one."""
    name = "kinds of requests"
    server.ask("/open_session", {"capacity_of_str_len": 4096, "session_id": name})
    given, cached = [], 0
    turn: dict[str, Any] = {"id": name}
    for number, said in enumerate((PROMPT, SAID)):
        rid = f"turn {number}"
        answer = generate(server, input_ids=said, session_params=turn, rid=rid)
        given.append(answer["output_ids"])
        turn = {"id": name, "rid": rid}
        cached += answer["meta_info"]["cached_tokens"]
    server.ask("/close_session", {"session_id": name})
    return given, cached


KINDS: dict[str, tuple[Callable[[SglangClient], Result], int]] = {
    "log probabilities of inputs": (scored, UNSCORED // PAGE_TOKENS * PAGE_TOKENS),
    "several answers": (several, pages_of(len(PROMPT))),
    "sessions": (in_a_session, 2 * pages_of(len(PROMPT))),
}
"""The requests, and how many tokens FlexKV gives them at least, or SGLang's cache behind it."""


@pytest.fixture(scope="module")
def wanted(
    tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path
) -> dict[str, object]:
    log = tmp_path_factory.mktemp("kinds") / "plain.log"
    with PlainServer(ServerConfig(model, TINY, forked=True), log) as server:
        made = {}
        for name, (ask, _) in KINDS.items():
            server.flush()
            made[name] = ask(server)[0]
        return made


@pytest.fixture(scope="module")
def cached(
    tmp_path_factory: pytest.TempPathFactory, model: Path, wanted: object
) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("kinds")
    settings = {
        "FLEXKV_CPU_CACHE_GB": "0.05",
        "FLEXKV_RUNTIME_DIR": str(folder / "run"),
        "FLEXKV_ALWAYS_LOAD": "1",
    }
    config = linker_config(model, TINY, settings, forked=True)
    with SglangServer(config, folder / "cached.log") as server:
        yield server


@pytest.mark.parametrize("name", KINDS)
def test_a_request_gets_the_same(
    cached: SglangServer, wanted: dict[str, object], name: str
) -> None:
    ask, least = KINDS[name]
    assert ask(cached)[0] == wanted[name]
    forget(cached)
    given, found = ask(cached)
    assert given == wanted[name]
    assert found >= least
