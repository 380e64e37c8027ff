# SPDX-License-Identifier: Apache-2.0
"""The core below the adapters knows no engine: no engine's name, and no flag of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "packages" / "flexkv" / "src" / "flexkv"
FOLDERS = ("settings", "tiers", "host", "transfer", "eviction", "layout")
_WORDS = re.compile(r"vllm|sglang|hicache|kv_connector|kv_transfer|\blinker|--[a-z]", re.IGNORECASE)


def engine_words(text: str) -> list[str]:
    """The lines of `text` that speak of an engine."""
    return [line.strip() for line in text.splitlines() if _WORDS.search(line)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_core_speaks_of_no_engine(folder: str) -> None:
    files = list(CORE.joinpath(folder).rglob("*.py"))
    assert files
    found = {str(file.relative_to(CORE)): engine_words(file.read_text()) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["# as vLLM does", 'source = "kv_connector_extra_config"', "use `--block-size`"]
)
def test_a_word_of_an_engine_is_found(line: str) -> None:
    assert engine_words(f"x = 1\n{line}\n") == [line]
