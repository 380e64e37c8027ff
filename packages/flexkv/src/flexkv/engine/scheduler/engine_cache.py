# SPDX-License-Identifier: Apache-2.0
"""An engine's cache with the objects that map its blocks to the engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flexkv.client import CacheClient
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.ended import EndedTransfers
from flexkv.engine.scheduler.engine import Describe, RequestSpans
from flexkv.engine.scheduler.groups import Groups
from flexkv.engine.scheduler.keys import BlockKeys
from flexkv.engine.scheduler.operator_calls import OperatorCalls
from flexkv.engine.scheduler.options import OptionsReader
from flexkv.engine.scheduler.reports import Sessions
from flexkv.operators.engine_door import EngineDoor, OperatorAccess
from flexkv.session import Session


@dataclass(frozen=True, slots=True)
class EngineCache:
    """The objects that all parts of a scheduler side share.

    Attributes:
        session: the session with the arena; owned, closed after the cache.
        cache: the cache over the arena; owned.
        recorder: records requests for `flexkv plan`; None if nothing is recorded. Owned.
        access: how operators reach the cache; None if they cannot.
    """

    session: Session
    cache: CacheClient
    groups: Groups
    keys: BlockKeys
    boundary: ErrorBoundary
    describe: Describe | None = None
    recorder: Recorder | None = None
    options: OptionsReader = field(default_factory=OptionsReader)
    access: OperatorAccess | None = None
    spans: RequestSpans | None = None
    ended: EndedTransfers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ended", EndedTransfers(self.cache))

    def open_door(
        self,
        root: str,
        engine: str,
        *,
        may_begin: Callable[[], bool],
        poll: Callable[[], None],
        sessions: Sessions,
        empty: Callable[[], bool],
    ) -> EngineDoor | None:
        """Answer operators, if they can reach the cache; see `OperatorCalls`. The caller closes the
        door."""
        if self.access is None:
            return None
        calls = OperatorCalls(
            self.cache,
            self.boundary,
            self.access,
            may_begin=may_begin,
            poll=poll,
            sessions=sessions,
            empty=empty,
        )
        return calls.open(root, engine, self.session.info.fingerprint)

    def close(self, flush_seconds: float) -> None:
        """Close recorder, cache and session. If a lower tier hangs, the arena stays mapped."""
        if self.recorder is not None:
            self.recorder.close()
        if self.cache.close(flush_seconds):
            self.session.close()
