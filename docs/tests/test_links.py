# SPDX-License-Identifier: Apache-2.0
"""Links of the README and of the site lead somewhere: to a file, and to a heading in it.

`nox -s docs` checks the links within the site as well, but not those of the other files."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"
FILES = sorted(
    [
        *ROOT.glob("*.md"),
        *PAGES.rglob("*.md"),
        *(ROOT / "packages").glob("*/README.md"),
        ROOT / "kernels" / "README.md",
    ]
)
LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.*?)$", re.MULTILINE)


def links(text: str) -> list[str]:
    """The targets outside of code that are no addresses on the web."""
    found = LINK.findall(CODE.sub("", text))
    return [each for each in found if not each.startswith(("http://", "https://", "mailto:"))]


def anchors(text: str) -> set[str]:
    """The names that headings get, as Python-Markdown makes them."""
    names: set[str] = set()
    for heading in HEADING.findall(CODE.sub("", text)):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
        ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        words = re.sub(r"[^\w\s-]", "", ascii_only).strip().lower()
        names.add(re.sub(r"[-\s]+", "-", words))
    return names


def fault(file: Path, link: str) -> str:
    """What is wrong with the link in that file, or ""."""
    path, _, anchor = link.partition("#")
    target = (file.parent / path).resolve() if path else file
    if not target.exists():
        return f"{link}: there is no {path}"
    if anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
        return f"{link}: no heading is named {anchor}"
    return ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    found = [fault(file, link) for link in links(file.read_text(encoding="utf-8"))]
    assert [each for each in found if each] == []


def test_a_link_to_nothing_is_noticed() -> None:
    page = PAGES / "index.md"
    assert links("see [a](b.md), [c](https://d.e) and\n```\n[f](g.md)\n```\n") == ["b.md"]
    assert (
        fault(page, "reference/nothing.md")
        == "reference/nothing.md: there is no reference/nothing.md"
    )
    assert "no heading is named" in fault(page, "reference/settings.md#nothing")
    assert fault(page, "reference/settings.md#cpu_cache_gb") == ""


def test_every_page_is_in_the_navigation() -> None:
    configuration = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"^ +- [^:\n]+: (\S+\.md)$", configuration, re.MULTILINE))
    pages = {str(page.relative_to(PAGES)) for page in PAGES.rglob("*.md")}
    measured = {page for page in pages if page.startswith("design/measured/")}
    assert pages - measured == named


def test_the_files_that_the_page_of_the_design_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (PAGES / "design" / "index.md").read_text())
    files = [f"/{each.relative_to(ROOT)}" for each in ROOT.glob("packages/*/src/**/*.py")]
    files += [f"/{each.relative_to(ROOT)}" for each in ROOT.glob("docs/*.py")]
    assert len(named) > 8
    assert [name for name in named if not any(each.endswith(f"/{name}") for each in files)] == []
