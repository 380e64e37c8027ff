# SPDX-License-Identifier: Apache-2.0
"""The troubleshooting page must quote messages that the code can give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pages" / "guides" / "troubleshooting.md"
SOURCES = [
    *(ROOT / "packages").glob("*/src/**/*.py"),
    *(ROOT / "kernels" / "python").rglob("*.py"),
    ROOT / "integration" / "preflight.py",
]


def quoted_messages() -> list[str]:
    """What the page quotes in headings and in tables of lines, and wherever it has a "...", which
    stands for what differs from case to case."""
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    tables = re.findall(r"^\| line.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    quotes = [quote for part in headings + rows for quote in re.findall("`(.*?)`", part)]
    elsewhere = [quote for quote in re.findall("`([^`\n]+)`", text) if "..." in quote]
    return sorted({*quotes, *elsewhere})


def templates(path: Path) -> Iterator[str]:
    """All strings of a source file, with "..." for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts
                )


@pytest.fixture(scope="module")
def all_templates() -> list[str]:
    found = [text for path in SOURCES for text in templates(path)]
    assert found
    return found


def occurs(message: str, texts: list[str]) -> bool:
    """Whether a text has all pieces of the message between its "...", in their order."""
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip()]
    return any(re.search(".*".join(pieces), text, re.DOTALL) for text in texts)


def test_page_quotes_messages() -> None:
    quoted = quoted_messages()
    assert len(quoted) >= 50
    assert "the service of FlexKV is gone" in quoted
    assert "vLLM replaces FlexKV by ..." in quoted


@pytest.mark.parametrize("message", quoted_messages())
def test_the_code_gives_the_quoted_message(message: str, all_templates: list[str]) -> None:
    assert occurs(message, all_templates)


def test_a_message_that_the_code_does_not_give_is_noticed(all_templates: list[str]) -> None:
    assert not occurs("the disk ... is full; allowed: ...", all_templates)
