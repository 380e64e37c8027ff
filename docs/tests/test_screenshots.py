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
