# SPDX-License-Identifier: Apache-2.0
"""The blocks that became loadable, or ceased to be loadable, since the last drain.

An index keeps a dictionary of the changes that no reader has taken, and nothing of those that one
has taken: what a reader knows of a block differs from the present if and only if the block is in
that dictionary. So a second change of a block removes the first one instead of following it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice


class Medium(enum.Enum):
    """The media of tiers, the fastest first. The values are labels of metrics."""

    HOST = "host"
    DISK = "disk"
    MOONCAKE = "mooncake"
    OBJECTS = "objects"

    @property
    def is_shared(self) -> bool:
        """Whether nodes share the tier. Such a tier must be asked which blocks it has."""
        return self not in (Medium.HOST, Medium.DISK)


BELOW = tuple(medium for medium in Medium if medium is not Medium.HOST)
"""The media of tiers below host memory."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed in one medium, the oldest change first. A reader that applies all changes knows
    which blocks are there. In host memory, a block comes after those that it builds on.

    Attributes:
        removed: keys of blocks that an earlier drain has returned as added, and that cannot be
            loaded any more.
        added: keys of blocks that can be loaded and could not at the last drain.
        texts: the descriptions of added blocks that an earlier process, or another engine, has
            left, by key.
    """

    medium: Medium
    removed: list[bytes]
    added: list[bytes]
    texts: Mapping[bytes, bytes] = field(default_factory=dict)


def changes_of(
    medium: Medium, changed: Mapping[bytes, bool], texts: Mapping[bytes, bytes] | None = None
) -> list[Changes]:
    """The changes of a medium: `changed` has for the key of each block whether it became loadable,
    `texts` descriptions of these blocks and others."""
    if not changed:
        return []
    removed = [key for key, loadable in changed.items() if not loadable]
    added = [key for key, loadable in changed.items() if loadable]
    described = {key: texts[key] for key in added if key in texts} if texts else {}
    return [Changes(medium, removed, added, described)]


def note(changed: dict[bytes, bool], key: bytes, loadable: bool) -> None:
    """Note that a block became loadable or ceased to be. If its last change is still in `changed`,
    the reader need not know of either."""
    if changed.pop(key, None) is None:
        changed[key] = loadable


def take_oldest(changed: dict[bytes, bool], limit: int) -> dict[bytes, bool]:
    """Remove up to `limit` changes from `changed`, the oldest first, and return them."""
    if len(changed) <= limit:
        taken = changed.copy()
        changed.clear()
        return taken
    taken = dict(islice(changed.items(), limit))
    for key in taken:
        del changed[key]
    return taken
