# SPDX-License-Identifier: Apache-2.0
"""Folders below a cache directory, as far as their owners see them."""

from __future__ import annotations

from pathlib import Path

from flexkv.tiers.disk.table import HEADER_OFFSETS, Header

OURS = "0a" * 32
OTHER = "0b" * 32
TABLE = Header(4096, 1, 1, OURS, 1).encode() * len(HEADER_OFFSETS)
"""What a folder is known by."""


def made(path: object, *more: str) -> Path:
    """A folder of FlexKV that nobody owns, with files `more` that are not FlexKV's."""
    folder = Path(str(path))
    folder.mkdir()
    for name in ("lock", "slab-00000", "slab-00001", "counters.json", "reset", *more):
        (folder / name).touch()
    (folder / "table").write_bytes(TABLE)
    return folder
