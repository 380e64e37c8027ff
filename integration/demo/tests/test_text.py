# SPDX-License-Identifier: Apache-2.0
"""Texts and their excerpts."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.demo.text import MIN_CHARACTERS, Text, TextError, load_text


def test_python_brings_a_long_text() -> None:
    text = load_text(None)
    assert len(text.content) > 100_000
    assert "assert" in text.content


def test_reads_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_text("Grüße. " * 1000, encoding="utf-8")
    text = load_text(path)
    assert text.name == "novel.txt"
    assert text.content.startswith("Grüße.")


@pytest.mark.parametrize("content", [None, b"too short", b"\xff\xfe\x00" * MIN_CHARACTERS])
def test_a_text_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError) as caught:
        load_text(path)
    assert str(path) in str(caught.value)
    assert "allowed: a UTF-8 text file" in str(caught.value)


def test_excerpts_have_the_length_and_differ() -> None:
    pieces = load_text(None).excerpts(3, 5_000)
    assert [len(piece) for piece in pieces] == [5_000] * 3
    assert len({piece[:200] for piece in pieces}) == 3


def test_excerpts_begin_with_paragraphs() -> None:
    text = Text("t", "\n\n".join(f"Paragraph {number}. " + "word " * 30 for number in range(100)))
    assert all(piece.startswith("Paragraph") for piece in text.excerpts(4, 1_000))


def test_a_short_text_is_read_on_from_its_beginning() -> None:
    content = "".join(chr(ord("a") + index % 26) for index in range(MIN_CHARACTERS))
    pieces = Text("t", content).excerpts(4, 10 * MIN_CHARACTERS)
    assert [len(piece) for piece in pieces] == [MIN_CHARACTERS] * 4
    assert pieces[0] == content
    half = MIN_CHARACTERS // 2
    assert pieces[2] == f"{content[half:]}\n\n{content[: half - 2]}"
