# SPDX-License-Identifier: Apache-2.0
"""What an engine tells the service of the uses of blocks, and which of them must stay."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence

from flexkv.client import Hold
from flexkv.eviction import RequestContext
from flexkv.service import messages as wire
from flexkv.service.line import Line

_MOST_LATE = 64
"""Demotions that wait for stores; beyond it the oldest is forgotten."""


class ServedUses:
    """Messages about uses and holds, none longer than a packet. Single-threaded."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._pins: set[str] = set()
        self._late: deque[tuple[set[int], Sequence[bytes]]] = deque(maxlen=_MOST_LATE)

    def record(
        self, keys: Sequence[bytes], context: RequestContext, prompt: Sequence[bytes] | None
    ) -> bool:
        """See `CacheClient.record`. Returns whether to tell the service at once, because others may
        wait for what the request computes."""
        whole = list(keys if prompt is None else prompt)
        found = len(keys)
        is_prefix = not found or (found <= len(whole) and whole[found - 1] == keys[-1])
        others = [] if is_prefix else list(keys)
        parts = [wire.RecordUse(part, found, [], None) for part in wire.parts(whole)]
        parts += [wire.RecordUse([], found, part, None) for part in wire.parts(others)]
        last = parts.pop() if parts else wire.RecordUse([], found, [], None)
        # All or none: the service joins those that come to one prompt.
        self._line.put(*parts, wire.RecordUse(last.prompt, found, last.others, context))
        return context.stores and is_prefix and len(whole) > found

    def touch(self, keys: Sequence[bytes]) -> None:
        # The first part last: every tier evicts the end of the prefix before its beginning.
        for part in reversed([*wire.parts(keys)]):
            self._line.put(wire.Touch(part))

    def ended(self, request_id: str, output_tokens: int) -> None:
        self._line.put(wire.RequestEnded(request_id, output_tokens))

    def hold(
        self,
        kind: Hold,
        keys: Sequence[bytes],
        owner: Hashable = None,
        seconds: float | None = None,
    ) -> None:
        if kind is Hold.PIN:
            self._pins.add(repr(owner))
        for part in wire.parts(keys):
            self._line.put(wire.HoldBlocks(kind, part, repr(owner), seconds))

    def unhold(self, kind: Hold, owner: Hashable = None, keys: Sequence[bytes] = ()) -> bool:
        name = repr(owner)
        if kind is Hold.RETAIN:
            for part in wire.parts(keys):
                self._line.put(wire.UnholdBlocks(kind, name, part))
            return False
        is_known = name in self._pins
        self._pins.discard(name)
        self._line.put(wire.UnholdBlocks(kind, name, []))
        return is_known

    def demote(self, keys: Sequence[bytes], untold: Collection[int]) -> None:
        """See `CacheClient.demote`. `untold`: the stores of which the service has yet to learn. It
        learns of the demotion after them: they may have blocks of the prefix."""
        self._late.append((set(untold), keys))
        self.tell_demotions(untold)

    @property
    def has_demotions(self) -> bool:
        """Whether the service has yet to learn of demotions."""
        return bool(self._late)

    def tell_demotions(self, untold: Collection[int]) -> None:
        """Tell the service of the demotions whose stores it knows or that have failed."""
        while self._late and self._late[0][0].isdisjoint(untold):
            _, keys = self._late.popleft()
            # The last part first: the end of the prefix leaves before its beginning.
            for part in reversed([*wire.parts(keys)]):
                self._line.put(wire.Demote(part))

    def forget_demotions(self) -> None:
        """The keys mean nothing any more."""
        self._late.clear()

    def unpin_all(self) -> None:
        """End the pins of all owners."""
        for owner in self._pins:
            self._line.put(wire.UnholdBlocks(Hold.PIN, owner, []))
        self._pins.clear()

    def lose(self) -> None:
        """The service is gone, and all pins with it."""
        self._pins.clear()
        self._late.clear()
