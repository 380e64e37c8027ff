# SPDX-License-Identifier: Apache-2.0
"""The script that takes the pictures of `flexkv` on a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.screenshots import ASSETS, take, take_live
from packages.flexkv.tests.cli.stores import FINGERPRINT, Cache


def test_a_picture_shows_what_the_command_prints(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2, 3]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n", encoding="utf-8")
    picture = tmp_path / "plan.svg"
    take(["plan", trace.name, "--token-bytes", "4096"], picture, tmp_path)
    text = " ".join(ElementTree.parse(picture).getroot().itertext()).replace("\xa0", " ")
    assert "flexkv plan trace.jsonl --token-bytes 4096" in text
    assert "2 requests" in text
    assert "Settings to use" in text
    assert str(tmp_path) not in text


def test_a_command_that_fails_makes_no_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    with pytest.raises(RuntimeError, match="plan none"):
        take(["plan", "none.jsonl", "--token-bytes", "4096"], picture, tmp_path)
    assert not picture.exists()


def test_a_picture_of_a_live_view_shows_the_last(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "kv")
    cache.fill(5)
    picture = tmp_path / "top.svg"
    take_live(["top", str(cache.root)], picture, 2.0)
    text = "".join(ElementTree.parse(picture).getroot().itertext()).replace("\xa0", " ")
    assert f"flexkv top {cache.root}" in text
    assert text.count(FINGERPRINT) == 1
    assert "q: quit" not in text
    assert "\x1b" not in text


def test_a_live_view_that_never_comes_makes_no_picture(tmp_path: Path) -> None:
    picture = tmp_path / "top.svg"
    with pytest.raises(RuntimeError, match="'none' on the command line does not exist"):
        take_live(["top", "none"], picture, 2.0)
    assert not picture.exists()


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.svg")), ids=lambda path: path.name)
def test_no_picture_asks_others_for_anything(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"""(?:href|src)=(?!"#)|url\((?!#)|@import""", text) == []


def luminance(color: str) -> float:
    """The relative luminance of a colour, by WCAG."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("name", ["plan.svg", "top.svg"])
def test_the_text_of_a_terminal_has_contrast(name: str) -> None:
    text = (ASSETS / name).read_text(encoding="utf-8")
    (ground,) = re.findall(r'<rect fill="(#[0-9a-f]{6})"', text)
    colors = re.findall(r"-r\d+ \{ fill: (#[0-9a-f]{6})", text)
    assert colors
    assert all((luminance(each) + 0.05) / (luminance(ground) + 0.05) >= 4.5 for each in colors)


def test_top_is_shown_with_the_words_of_today() -> None:
    text = (ASSETS / "top.svg").read_text(encoding="utf-8")
    assert "health" in text
    assert "closed" not in text
    assert "/tmp" not in text
