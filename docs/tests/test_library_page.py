# SPDX-License-Identifier: Apache-2.0
"""The example of the page runs as it stands there, and the API page has all public names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import flexkv

PAGES = Path(__file__).parents[1] / "pages"


def block(language: str) -> str:
    """The only block of that language on the page."""
    text = (PAGES / "start" / "library.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", block("python")]
    for _ in range(2):  # with the blocks that the first left on disk, too
        printed = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=120)
        assert printed == block("text")
    assert list((tmp_path / "blocks").iterdir())


def test_the_example_is_short() -> None:
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 20


def test_the_api_page_has_every_public_name() -> None:
    text = (PAGES / "reference" / "api.md").read_text(encoding="utf-8")
    described = re.findall(r"^::: flexkv\.(\w+)$", text, re.MULTILINE)
    assert sorted(described) == sorted(set(flexkv.__all__) - {"__version__"})
