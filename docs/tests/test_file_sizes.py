# SPDX-License-Identifier: Apache-2.0
"""A file holds one idea: none is long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("packages", "kernels", "integration", "compat-ci", "deploy", "docs", "mutants")
SUFFIXES = frozenset({".py", ".cpp", ".cu", ".cuh", ".h", ".hpp"})
MOST_LINES = 600
"""A state machine is one idea, and the largest ones need about as much."""


def long_files(root: Path) -> Iterator[str]:
    """Source files of the project in `root` that have more lines than the rules allow."""
    files = [path for folder in FOLDERS for path in root.joinpath(folder).rglob("*")]
    for path in [*files, *root.glob("*.py")]:
        parts = path.relative_to(root).parts
        # Environments and what builds leave behind.
        if path.suffix not in SUFFIXES or any(part.startswith((".", "build-")) for part in parts):
            continue
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            yield f"{path.relative_to(root)}: {lines} lines"


def test_no_file_is_long() -> None:
    assert list(long_files(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "lines", "is_long"),
    [
        ("packages/flexkv/src/flexkv/a.py", MOST_LINES, False),
        ("packages/flexkv/src/flexkv/a.py", MOST_LINES + 1, True),
        ("packages/flexkv/tests/test_a.py", MOST_LINES + 1, True),
        ("kernels/src/a.cpp", MOST_LINES + 1, True),
        ("integration/harness/a.py", MOST_LINES + 1, True),
        ("noxfile.py", MOST_LINES + 1, True),
        ("kernels/.venv/a.py", MOST_LINES + 1, False),
    ],
)
def test_a_long_file_is_found(tmp_path: Path, file: str, lines: int, is_long: bool) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n" * lines)
    assert bool(list(long_files(tmp_path))) == is_long
