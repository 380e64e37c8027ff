# SPDX-License-Identifier: Apache-2.0
"""What the cache calls the blocks of a request: the engine's own hashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flexkv.adapter.engine import EngineRequest
from flexkv.adapter.groups import Group, Groups, Reach


@dataclass(slots=True)
class MadeKeys:
    """Keys of a request's first blocks in a group, as far as they were made.

    Attributes:
        keys: in order.
        last: the hash that the last one was made of, which covers all before it.
    """

    keys: list[bytes] = field(default_factory=list)
    last: bytes = b""

    def fit(self, hashes: Sequence[bytes], step: int) -> bool:
        """Whether they were made of every `step`th of these hashes: the engine takes some back if a
        session goes on differently."""
        count = len(self.keys) * step
        return count == 0 or (count <= len(hashes) and hashes[count - 1] == self.last)


class HasKeys(Protocol):
    """What is known of a request, its keys among that.

    Attributes:
        request: the engine's.
        keys: that were made of its hashes, by the group's index.
    """

    @property
    def request(self) -> EngineRequest: ...
    @property
    def keys(self) -> dict[int, MadeKeys]: ...


class BlockKeys:
    """Keys of blocks.

    A key is the hash of the block's last token range, which covers the whole prefix up to there;
    then the number of the group, but for the first of full attention, which has most blocks; then
    the stamp of the request.

    Args:
        groups: of the model.
        stamp: what else tells blocks of a request from others of the same hash; empty if nothing.

    Attributes:
        are_hashes: whether they are the engine's hashes and nothing more, except for stamps.
        hash_tokens: tokens that one of the engine's block hashes stands for.
    """

    def __init__(self, groups: Groups, stamp: Callable[[Any], bytes]) -> None:
        self._stamp = stamp
        self.are_hashes = groups.plain
        full = [group for group in groups.members if group.reach is Reach.ALL]
        self._unnumbered = full[0].index if full else None
        self.hash_tokens = groups.hash_tokens

    def of(
        self, tracked: HasKeys, group: Group, start: int = 0, stop: int | None = None
    ) -> Sequence[bytes]:
        """Keys of FlexKV blocks `start` to `stop` of a request in a group, as far as the engine has
        hashed its tokens."""
        hashes: Sequence[bytes] = tracked.request.block_hashes
        step = group.block_tokens // self.hash_tokens
        end = None if stop is None else stop * step
        ending = self._ending(tracked, group)
        if ending and group.reach is Reach.ALL:
            return self._made(tracked, group, step, ending).keys[start:stop]
        wanted = hashes[(start + 1) * step - 1 : end : step]
        return [each + ending for each in wanted] if ending else wanted

    def _made(self, tracked: HasKeys, group: Group, step: int, ending: bytes) -> MadeKeys:
        """All keys of a request in a group of full attention, which are asked for again and again:
        of others only the last are of use."""
        hashes = tracked.request.block_hashes
        made = tracked.keys.get(group.index)
        if made is None or not made.fit(hashes, step):
            made = tracked.keys[group.index] = MadeKeys()
        fresh = hashes[(len(made.keys) + 1) * step - 1 :: step]
        if fresh:
            made.keys += [each + ending for each in fresh]
            made.last = fresh[-1]
        return made

    def _ending(self, tracked: HasKeys, group: Group) -> bytes:
        """What the keys of a request in a group have behind the hash."""
        is_hash = self.are_hashes or group.index == self._unnumbered
        ending = b"" if is_hash else bytes([group.index])
        return ending + self._stamp(tracked.request)
