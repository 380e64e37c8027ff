# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from flexkv.control import prompts
from flexkv.control.http_door import RefusedError
from flexkv.control.prompts import PromptQuestion, read_question


def test_a_prompt_is_tokens_or_hashes() -> None:
    assert read_question(b'{"tokens": [1, 2], "cache_salt": "a"}') == PromptQuestion(
        (1, 2), (), "a"
    )
    assert read_question(b'{"hashes": ["00ff00ff"]}') == PromptQuestion(hashes=("00ff00ff",))


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
    monkeypatch.setattr(prompts, "MOST_TOKENS", 4)
    with pytest.raises(RefusedError, match=error):
        read_question(json.dumps(content).encode())


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedError, match="is no JSON of a prompt"):
        read_question(body)
