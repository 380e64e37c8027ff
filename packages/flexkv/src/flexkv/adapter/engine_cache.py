# SPDX-License-Identifier: Apache-2.0
"""An engine's cache, and what its blocks are to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.adapter.engine import Describe
from flexkv.adapter.groups import Groups
from flexkv.adapter.guard import Edge
from flexkv.adapter.keys import BlockKeys
from flexkv.adapter.recorder import Recorder
from flexkv.cache import KVCache
from flexkv.host.session import Session


@dataclass(frozen=True, slots=True)
class EngineCache:
    """What all parts of a scheduler side work on.

    Attributes:
        session: with the arena; owned, closed after the cache.
        cache: over the arena; owned.
        groups: of the model.
        keys: of the blocks.
        edge: where errors of single requests end.
        describe: for events; None if nobody listens.
        recorder: of requests, for `flexkv plan`; None if nothing is recorded. Owned.
    """

    session: Session
    cache: KVCache
    groups: Groups
    keys: BlockKeys
    edge: Edge
    describe: Describe | None = None
    recorder: Recorder | None = None

    def close(self, flush_seconds: float) -> None:
        """End the cache, whose lower tiers may write for so many seconds, and leave the session.
        If a lower tier hangs, the arena stays mapped."""
        if self.recorder is not None:
            self.recorder.close()
        if self.cache.close(flush_seconds):
            self.session.close()
