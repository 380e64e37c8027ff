# SPDX-License-Identifier: Apache-2.0
"""Which blocks the conversations have that clients have named."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_KEYS = 1 << 17
"""The most keys that are kept, about 14 MB; the conversations not heard of for longest are
forgotten first. Not tuned."""
_MOST_RUNNING = 1 << 12
"""The most requests whose end is awaited. Not tuned."""


class Sessions:
    """The keys of each conversation, as its latest request has shown them. Single-threaded."""

    def __init__(self) -> None:
        self._keys: dict[str, Sequence[bytes]] = {}  # the one heard of last is last
        self._count = 0
        self._running: dict[str, str] = {}

    def began(self, request_id: str, session: str, keys: Sequence[bytes]) -> None:
        """A request of a conversation has begun.

        Args:
            request_id: of the request.
            session: name of the conversation among those of all tenants; empty if it has none.
            keys: of its prompt's blocks.
        """
        if not session:
            return
        self._note(session, keys)
        self._running[request_id] = session
        if len(self._running) > _MOST_RUNNING:
            del self._running[next(iter(self._running))]

    def follows(self, request_id: str) -> bool:
        """Whether `ended` needs the keys of this request."""
        return request_id in self._running

    def ended(self, request_id: str, keys: Sequence[bytes]) -> None:
        """A request has ended with these blocks, those of its answer included."""
        session = self._running.pop(request_id, None)
        if session is not None:
            self._note(session, keys)

    def keys_of(self, session: str) -> Sequence[bytes]:
        """The keys of a conversation, first block first; empty if it is unknown."""
        return self._keys.get(session, ())

    def known(self) -> dict[str, Sequence[bytes]]:
        """The keys of all conversations."""
        return dict(self._keys)

    def forget(self, session: str) -> None:
        """Forget a conversation."""
        self._count -= len(self._keys.pop(session, ()))

    def forget_all(self) -> None:
        """Forget all conversations, but those of running requests are known again at their end."""
        self._keys.clear()
        self._count = 0

    def _note(self, session: str, keys: Sequence[bytes]) -> None:
        self.forget(session)
        self._keys[session] = keys[:]  # packed keys share their memory
        self._count += len(keys)
        while self._count > _MOST_KEYS:
            self.forget(next(iter(self._keys)))


def own_keys(session: str, known: dict[str, Sequence[bytes]]) -> list[bytes]:
    """The keys of a conversation that no other one has."""
    others = {key for name, keys in known.items() if name != session for key in keys}
    return [key for key in known.get(session, ()) if key not in others]
