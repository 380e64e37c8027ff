# SPDX-License-Identifier: Apache-2.0
"""Structured output on a real SGLang with FlexKV: a grammar over loaded pages, which it shares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.tokenizers import write_bytes
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import ServerConfig, SglangClient
from integration.tests.sglang_linked import Linked, pages_of, tokens

FLAGS = {
    "skip_tokenizer_init": False,
    "grammar_backend": "xgrammar",
    "constrained_json_disable_any_whitespace": True,
}
PROMPT = tokens("structured", 333)
HIT = pages_of(len(PROMPT))
SIZES = ["small", "large", "huge"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{6}$"},
        "size": {"enum": SIZES},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{3}-[0-9]{12}"

GRAMMARS: dict[str, dict[str, str]] = {
    "none": {},
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": REGEX},
    "ebnf": {"ebnf": 'root ::= ("a" | "b" | "c")+ "."'},
}


def ask(server: SglangClient, grammar: str) -> tuple[str, int]:
    """The text of the answer, and how much of the prompt was cached."""
    sampling = {"max_new_tokens": 96, "temperature": 0.0, **GRAMMARS[grammar]}
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    answer: dict[str, Any] = json.loads(server.ask("/generate", body))
    return answer["text"], answer["meta_info"]["cached_tokens"]


@pytest.fixture(scope="module")
def spelling_model(work_dir: Path) -> Path:
    path = write_checkpoint(TINY, work_dir / "spelling")
    write_bytes(path, TINY.vocab)
    return path


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory, spelling_model: Path, sglang: Path
) -> dict[str, str]:
    config = ServerConfig(spelling_model, TINY, flags=FLAGS, forked=True)
    given = {}
    with PlainServer(config, tmp_path_factory.mktemp("structured") / "plain.log") as server:
        for grammar in GRAMMARS:
            server.flush()
            given[grammar] = ask(server, grammar)[0]
    found = json.loads(given["schema"])
    assert re.fullmatch("[a-z]{6}", found["name"])
    assert found["size"] in SIZES
    assert re.fullmatch(REGEX, given["regex"])
    assert re.fullmatch(r"[abc]+\.", given["ebnf"])
    return given


@pytest.fixture(scope="module")
def linked(
    tmp_path_factory: pytest.TempPathFactory, spelling_model: Path, plain: object
) -> Iterator[Linked]:
    linked = Linked(tmp_path_factory.mktemp("grammars"), spelling_model, FLAGS)
    linked.start(forked=True)
    try:
        yield linked
    finally:
        linked.close()


def check(linked: Linked, plain: dict[str, str]) -> None:
    for grammar, text in plain.items():
        linked.forget()
        assert ask(linked.server, grammar) == (text, HIT), grammar


def test_a_grammar_gives_the_same_text_over_loaded_pages(
    linked: Linked, plain: dict[str, str]
) -> None:
    first = next(iter(GRAMMARS))
    assert ask(linked.server, first) == (plain[first], 0)
    check(linked, plain)


def test_a_grammar_gives_the_same_text_over_pages_of_an_earlier_server(
    linked: Linked, plain: dict[str, str]
) -> None:
    ask(linked.server, next(iter(GRAMMARS)))
    linked.restart()
    check(linked, plain)
