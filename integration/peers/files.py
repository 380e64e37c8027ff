# SPDX-License-Identifier: Apache-2.0
"""What is looked at in files that a peer keeps blocks in, one each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from integration.peers.page import Finding


def modes(files: Iterable[Path]) -> str:
    """Permissions of files, which are all alike unless there is a comma."""
    return ", ".join(sorted({f"{file.stat().st_mode & 0o7777:04o}" for file in files}))


def flip(file: Path, every: int | None = None) -> None:
    """Flip a bit of one byte, as a bad drive does, or of the last of each `every` bytes."""
    data = bytearray(file.read_bytes())
    for place in range(every - 1, len(data), every) if every else [len(data) // 2]:
        data[place] ^= 0x80
    file.write_bytes(data)


def file_findings(
    peer: str, folder: Path, mode: str, write: Callable[[], bytes], read: Callable[[], bytes]
) -> Iterator[Finding]:
    """The rows about files, which all peers with one file a block have.

    Args:
        mode: that the page says of files, without an umask.
        write: writes blocks, and returns their bytes.
        read: reads the same in an instance that has written none.
    """
    mask = os.umask(0)
    written = write()
    os.umask(mask)
    files = sorted(folder.rglob("*.bin"))
    yield Finding(peer, "mode of files on disk", modes(files), holds=modes(files) == mode)

    same = read() == written
    seen = f"another instance on the same folder loads the same bytes: {same}"
    yield Finding(peer, "one cache for the engines of a node", seen, holds=same)
    yield Finding(peer, "blocks on disk found after a restart", seen, holds=same)

    flip(files[0])
    wrong = sum(one != other for one, other in zip(read(), written, strict=True))
    os.truncate(files[1], files[1].stat().st_size // 2)
    try:
        read()
        refused = False
    except (OSError, RuntimeError):
        refused = True
    seen = f"a flipped bit: {wrong} wrong byte loaded; a short file refused: {refused}"
    yield Finding(peer, "bytes verified when read from disk", seen, holds=wrong == 1 and refused)
