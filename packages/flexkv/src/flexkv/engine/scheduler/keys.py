# SPDX-License-Identifier: Apache-2.0
"""The keys of a request's blocks: the engine's own hashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flexkv.engine.key_epoch import KeyEpoch
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv.engine.scheduler.request import MadeKeys, TrackedRequest


class BlockKeys:
    """Keys of blocks.

    A key begins with the hash of the block's last token range, which covers the whole prefix up to
    its end. Then follow the number of the group, the stamp of the request, and the end of the
    epoch. The first group of full attention, which has most blocks, has no number. `stamp` makes
    what distinguishes blocks of a request from others of the same hash; empty if not needed. If
    `are_hashes`, keys are just the engine's hashes, apart from stamps and epochs.
    """

    def __init__(self, groups: Groups, stamp: Callable[[Any], bytes]) -> None:
        self._stamp = stamp
        self.epoch = KeyEpoch()
        self.are_hashes = groups.plain
        first = groups.furthest
        self._unnumbered = first.index if first.reach is Reach.ALL else None
        # Computed once, because keys are made in every step.
        self._numbers = {
            group.index: b"" if group.index == self._unnumbered else bytes([group.index])
            for group in groups.members
        }
        self.hash_tokens = groups.hash_tokens

    def of(
        self, tracked: TrackedRequest, group: Group, start: int = 0, stop: int | None = None
    ) -> Sequence[bytes]:
        """Keys of FlexKV blocks `start` to `stop` of a request in a group, as far as the engine has
        hashed its tokens."""
        hashes: Sequence[bytes] = tracked.request.block_hashes
        step = group.block_tokens // self.hash_tokens
        end = None if stop is None else stop * step
        # The part of a key that follows the hash.
        ending = self._numbers[group.index] + self._stamp(tracked.request) + self.epoch.end
        if ending and group.reach is Reach.ALL:
            return self._made(tracked, group, step, ending).keys[start:stop]
        wanted = hashes[(start + 1) * step - 1 : end : step]
        return [each + ending for each in wanted] if ending else wanted

    def of_hashes(self, hashes: Sequence[bytes], group: Group) -> list[bytes]:
        """Keys of a prompt that is no request, and that uses no adapter. `hashes` are all of the
        engine's hashes of it, or some in a row that begin with a block."""
        step = group.block_tokens // self.hash_tokens
        ending = self._numbers[group.index] + self.epoch.end
        return [each + ending for each in hashes[step - 1 :: step]]

    def origin(self, key: bytes) -> tuple[int, bytes] | None:
        """The group and the engine's hash of a block whose request has no stamp; None for a block
        of another epoch.

        The engine's hashes have an even number of bytes, so a key of an odd length ends with the
        number of its group, apart from the epoch's end.
        """
        if not self.epoch.has(key):
            return None
        key = key.removesuffix(self.epoch.end)
        if self.are_hashes or len(key) % 2 == 0:
            return self._unnumbered or 0, key
        return key[-1], key[:-1]

    def _made(self, tracked: TrackedRequest, group: Group, step: int, ending: bytes) -> MadeKeys:
        """All keys of a request in a group of full attention, which are needed repeatedly. Of other
        groups only the last keys are needed."""
        hashes = tracked.request.block_hashes
        made = tracked.keys.get(group.index)
        if made is None or not made.fit(hashes, step, ending):
            made = tracked.keys[group.index] = MadeKeys(ending)
        fresh = hashes[(len(made.keys) + 1) * step - 1 :: step]
        if fresh:
            made.keys += [each + ending for each in fresh]
            made.last = fresh[-1]
        return made
