# SPDX-License-Identifier: Apache-2.0
"""What the disks of a pool have, in memory that its engines read."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence

from flexkv.host.memory_file import Pages, create_file
from flexkv.index.key_set import key_set, key_set_bytes
from flexkv.types.changes import Changes, Medium

logger = logging.getLogger(__name__)


class TierKeys:
    """The keys of the blocks that disks have. A key shows a moment after its block is written, and
    for a moment after it has left: a fetch tells.

    Args:
        blocks: the most that disks have.

    Attributes:
        fd: descriptor of the memory; owned.
    """

    def __init__(self, blocks: int) -> None:
        size = key_set_bytes(blocks)
        self.fd = create_file(size, Pages.ORDINARY)
        self._keys = key_set(mmap.mmap(self.fd, size), is_owner=True)
        self._lacks_some = False

    def note(self, changes: Sequence[Changes], *, are_all: bool) -> None:
        """Note what came and left.

        Args:
            changes: of any media.
            are_all: whether all changes so far are known now, of blocks from before the start, too.
        """
        for change in changes:
            if change.medium is Medium.DISK:
                self._keys.remove(change.removed)
                self._add(change.added)
        if are_all and not self._lacks_some:
            self._keys.is_complete = True

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each of `keys` whether a disk has its block."""
        return self._keys.contains(keys)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _add(self, keys: Sequence[bytes]) -> None:
        refused = self._keys.add(keys)
        if refused and not self._lacks_some:
            self._lacks_some = True
            self._keys.is_complete = False
            logger.error(
                "the disks have more blocks than the %d that engines know of; engines ask the "
                "service for the others",
                len(self._keys),
            )
