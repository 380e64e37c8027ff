# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest

from flexkv.operators import verbs
from flexkv.operators.verbs import CLEAR, LOOKUP, PIN, RELEASE, PromptQuestion, RefusedError


def test_a_prompt_is_tokens_or_hashes() -> None:
    assert LOOKUP.read(b'{"tokens": [1, 2], "cache_salt": "a"}') == PromptQuestion((1, 2), (), "a")
    assert LOOKUP.read(b'{"hashes": ["00ff00ff"]}') == PromptQuestion(hashes=("00ff00ff",))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({}, "0 tokens and 0 hashes"),
        ({"tokens": [1], "hashes": ["00ff00ff"]}, "1 tokens and 1 hashes"),
        ({"tokens": [1, -1]}, "the token -1; allowed: 0 to 4294967295"),
        ({"tokens": [1 << 32]}, "the token 4294967296"),
        ({"tokens": [1] * 5}, "5 tokens or hashes; allowed: at most 4"),
        ({"tokens": ["a"]}, "is no JSON of a prompt"),
        ({"token": [1]}, "unknown field `token`"),
        ({"hashes": ["xyz"]}, "the hash 'xyz'; allowed: 4 to 64 bytes"),
        ({"hashes": ["00FF00FF"]}, "the hash '00FF00FF'"),
        ({"hashes": ["00ff00f"]}, "the hash"),
        ({"hashes": ["00ff00ff\n"]}, "the hash"),
        ({"hashes": ["00ff00ff"], "cache_salt": "a"}, "a salt with tokens only"),
        ([1], "is no JSON of a prompt"),
    ],
)
def test_what_is_no_prompt_is_refused(
    content: object, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "MOST_TOKENS", 4)
    with pytest.raises(RefusedError, match=error):
        LOOKUP.read(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (PIN, 'is no JSON of a prompt .*seconds.*; allowed: {"tokens": '),
        (RELEASE, 'is no JSON of a conversation .*; allowed: {"session": "NAME"'),
        (CLEAR, 'is not about all blocks .*; allowed: {"blocks": "all"}'),
    ],
)
def test_a_question_of_another_verb_is_refused_with_an_example(
    verb: verbs.Verb[Any, Any], said: str
) -> None:
    body = b'{"tokens": [1], "seconds": "a"}'
    with pytest.raises(RefusedError, match=said):
        verb.read(body)


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedError, match="is no JSON of a prompt"):
        LOOKUP.read(body)
