# SPDX-License-Identifier: Apache-2.0
"""What FlexKV does for requests, from its begin to its span, where an engine follows its transfers
by their numbers alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flexkv.client import Ended, FetchState
from flexkv.engine.scheduler.engine import EngineRequest, RequestSpans

_MOST = 4096
"""Transfers that are followed at once; beyond it the oldest has no span. Not tuned."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    request: EngineRequest
    blocks: int
    begun: float


def add_fetch(spans: RequestSpans, request: EngineRequest, state: FetchState) -> None:
    """A fetch of a request has ended, with this last state."""
    if state.length:
        came = {f"{medium.value}_blocks": n for medium, (n, _) in state.gave.items()}
        blocks = {"blocks": state.length, "arrived_blocks": state.arrived, **came}
        spans.add(request, "fetch", state.begun, blocks)


class TracedWork:
    """The fetches and transfers of one engine. Single-threaded. No call raises.

    Attributes:
        spans: takes what has ended; None if the engine does not trace requests.
    """

    def __init__(self, spans: RequestSpans | None = None) -> None:
        self.spans = spans
        self._running: dict[int, _Transfer] = {}

    def began(self, transfer_id: int, request: EngineRequest | None, blocks: int) -> None:
        """A transfer was ordered for a request; None if the request is unknown.

        Args:
            transfer_id: of the transfer.
            request: borrowed until the end.
            blocks: their number.
        """
        if self.spans is None or request is None:
            return
        if len(self._running) >= _MOST:
            del self._running[next(iter(self._running))]
        self._running[transfer_id] = _Transfer(request, blocks, time.monotonic())

    def ended(self, transfer: Ended) -> None:
        """A transfer has ended."""
        running = self._running.pop(transfer.id, None)
        if running is not None and self.spans is not None:
            attributes = {"blocks": running.blocks, "done": transfer.done}
            name = transfer.direction.name.lower()
            self.spans.add(running.request, name, running.begun, attributes)

    def cancelled(self, transfer_id: int) -> None:
        """A transfer will not begin."""
        self._running.pop(transfer_id, None)

    def fetched(self, request: EngineRequest | None, state: FetchState) -> None:
        """A fetch has ended, with this last state."""
        if self.spans is not None and request is not None:
            add_fetch(self.spans, request, state)
