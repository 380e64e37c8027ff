# SPDX-License-Identifier: Apache-2.0
"""The parts of a folder's fingerprint as text beside its blocks, one `NAME: VALUE` a line.

No block depends on the file. It lets an engine that begins empty name the parts that differ from
those of a folder with blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence

from flexkv.system.regular_files import open_regular
from flexkv.tiers.disk.cache_directory import IDENTITY, fingerprint_of, folders
from flexkv.tiers.disk.files import open_folder
from flexkv.tiers.disk.ledger import load_ledger

logger = logging.getLogger(__name__)

_MAX_BYTES = 8192
"""The most bytes of the file, two pages of the folder's bound."""

_MODEL_PARTS = ("weights", "configuration")
"""Names of the parts by which two folders are of one model; see `flexkv.engine.weights`."""

_VALUE_CHARACTERS = 60
"""The most characters of a value in the log."""


def save_identity(folder: int, identity: Iterable[str]) -> None:
    """Write the parts into the open directory `folder`. If the system refuses, there is no file.

    Args:
        folder: descriptor of the directory, which this process owns.
        identity: the parts, each `NAME: VALUE`.
    """
    lines = "".join(" ".join(part.split()) + "\n" for part in identity)
    if not lines:
        return
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(IDENTITY, dir_fd=folder)
        fd = open_regular(folder, IDENTITY, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(fd, lines.encode(errors="replace")[:_MAX_BYTES])
        finally:
            os.close(fd)


def report_differences(root: str, identity: Sequence[str], fingerprint: str) -> None:
    """Log which parts of the fingerprint keep an engine from the blocks of its model below `root`:
    those of the folder that differs in the fewest parts.

    Args:
        root: the cache directory.
        identity: the parts of the engine's fingerprint.
        fingerprint: the engine's fingerprint.

    Raises:
        DiskError: `root` cannot be read.
    """
    ours = _parts(identity)
    nearest: tuple[str, dict[str, str]] | None = None
    for path in folders(root):
        if fingerprint_of(path) == fingerprint:
            continue
        # A folder that cannot be read is another user's.
        with contextlib.suppress(OSError):
            theirs = _read(path)
            if not any(ours.get(name, "") == theirs.get(name) for name in _MODEL_PARTS):
                continue
            if nearest is None or len(_differing(ours, theirs)) < len(_differing(ours, nearest[1])):
                nearest = path, theirs
    if nearest is not None:
        path, theirs = nearest
        same = theirs.get("weights") == ours.get("weights")
        logger.warning(
            "%s begins empty, but %s has blocks of %s under another fingerprint; what differs: %s",
            os.path.join(root, fingerprint),
            path,
            "this model" if same else "a model of this configuration",
            "; ".join(
                f"{name} ({_shown(theirs, name)} there, {_shown(ours, name)} here)"
                for name in _differing(ours, theirs)
            ),
        )


def _read(path: str) -> dict[str, str]:
    """The parts of a folder that has been written to; empty for any other.

    Raises:
        OSError: the folder cannot be read.
    """
    folder = open_folder(path)
    try:
        if not load_ledger(folder).written_blocks:
            return {}
        fd = open_regular(folder, IDENTITY, os.O_RDONLY)
        try:
            text = os.pread(fd, _MAX_BYTES, 0).decode(errors="replace")
        finally:
            os.close(fd)
    finally:
        os.close(folder)
    return _parts(text.splitlines())


def _parts(identity: Iterable[str]) -> dict[str, str]:
    named = (part.partition(": ") for part in identity)
    return {name: " ".join(value.split()) for name, colon, value in named if colon}


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def _shown(parts: Mapping[str, str], name: str) -> str:
    value = parts.get(name)
    return "not set" if value is None else repr(value[:_VALUE_CHARACTERS])
