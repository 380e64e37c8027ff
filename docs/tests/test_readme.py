# SPDX-License-Identifier: Apache-2.0
"""The README is short, and its figures are those of the pages that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = re.findall(r"^\| (.*?) \| (.*?) \| \[.*?\]\((.*?)\) \|$", README, re.MULTILINE)
NUMBER = re.compile(r"\d[\d,]*\.?\d+|\.\d+")


def missing(row: str, page: str) -> list[str]:
    """The numbers of a row that are not on the page."""
    return [number for number in NUMBER.findall(row) if number not in page]


def test_there_are_five_figures() -> None:
    assert len(FIGURES) == 5


@pytest.mark.parametrize(
    ("what", "figure", "link"), FIGURES, ids=[each[0][:20] for each in FIGURES]
)
def test_figures_are_on_the_page_that_is_named(what: str, figure: str, link: str) -> None:
    page = (ROOT / link.partition("#")[0]).read_text(encoding="utf-8")
    assert NUMBER.findall(what + " " + figure)
    assert missing(f"{what} {figure}", page) == []


def test_a_figure_that_is_outdated_is_noticed() -> None:
    assert missing("0.005 of 8,192 tokens, .245", "0.004 for 8,192 tokens: .245") == ["0.005"]


def rows(page: str) -> list[str]:
    """The rows of the tables that compare five columns, without references to notes."""
    found = re.findall(r"^\|(?: [^|]+ \|){5}$", page, re.MULTILINE)
    return [re.sub(r" \[(\d+|run)\]", "", row) for row in found]


def test_the_comparison_is_that_of_its_page() -> None:
    compared = rows(README)
    assert len(compared) == 10
    page = rows((ROOT / "docs/pages/compare.md").read_text(encoding="utf-8"))
    assert [row for row in compared if row not in page] == []


def test_there_is_one_picture_and_the_command_that_runs_all_tests() -> None:
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 1
    assert "pip install nox && nox -s tests" in README
    assert len(README.splitlines()) < 100
