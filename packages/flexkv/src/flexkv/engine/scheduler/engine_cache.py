# SPDX-License-Identifier: Apache-2.0
"""An engine's cache with the objects that map its blocks to the engine's."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexkv.client import CacheClient
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.ended import EndedTransfers
from flexkv.engine.scheduler.engine import Describe, EnginePool
from flexkv.engine.scheduler.groups import Groups
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.scheduler.options import OptionsReader
from flexkv.engine.scheduler.spans import OtelSpans
from flexkv.operators.engine_door import OperatorAccess
from flexkv.session import Session


@dataclass(slots=True)
class EngineCache:
    """The objects that all parts of a scheduler side share.

    Attributes:
        session: the session with the arena; owned, closed after the cache.
        cache: the cache over the arena; owned.
        recorder: records requests for `flexkv plan`; None if nothing is recorded. Owned.
        access: how operators reach the cache; None if they cannot.
        pool: the engine's own prefix cache; None until the engine gives it. Borrowed.
    """

    session: Session
    cache: CacheClient
    groups: Groups
    keys: BlockKeys
    chooser: LoadChooser
    boundary: ErrorBoundary
    describe: Describe | None = None
    recorder: Recorder | None = None
    options: OptionsReader = field(default_factory=OptionsReader)
    access: OperatorAccess | None = None
    spans: OtelSpans | None = None
    pool: EnginePool | None = None
    ended: EndedTransfers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.ended = EndedTransfers(self.cache)

    def close(self, flush_seconds: float) -> None:
        """Close recorder, cache and session. If a lower tier hangs, the arena stays mapped."""
        if self.recorder is not None:
            self.recorder.close()
        if self.cache.close(flush_seconds):
            self.session.close()
