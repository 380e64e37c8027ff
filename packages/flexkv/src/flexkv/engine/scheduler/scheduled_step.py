# SPDX-License-Identifier: Apache-2.0
"""An engine's description of a step that it has scheduled, and when it steps without requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

Tables = Sequence[Sequence[int]]
"""The engine's blocks of a request, in order, for each of the engine's KV cache groups."""

States = Mapping[str, Iterable[tuple[int, int, int]]]
"""Recurrent states that are complete after a step: by request, group, block and tokens."""


class Placed(NamedTuple):
    """A request that a step computes with exactly these blocks. The KV of so many of its tokens is
    in them. The step, or one after it, writes to the rest."""

    request_id: str
    tables: Tables
    tokens: int


@dataclass(slots=True)
class ScheduledStep:
    """A step, as the engine describes it to its workers. Borrowed until the call that gets it has
    returned.

    Attributes:
        tokens: tokens that the step computes, by request; a dictionary.
        total_tokens: the sum of these tokens; 0 if the step computes nothing.
        draft_tokens: the number of them that are guesses of a draft model.
        placed: requests that the engine computes for the first time, or again after it had taken
            their blocks.
        request_ids: ids of other requests, which keep their blocks.
        new_blocks: for each of `request_ids` the blocks that it gets in addition; None if it gets
            none.
        replaced: those of `request_ids` that do not keep their blocks: they are also in `placed`.
        preempted: ids of requests whose blocks the engine has taken since the last step.
        ended: ids of requests that have ended since the last step.
        touched: blocks that the step reads or writes beside those of its requests.
        overwritten: those of them that workers may write to before they wait for fenced stores.
    """

    tokens: Mapping[str, int]
    total_tokens: int
    draft_tokens: int = 0
    placed: Sequence[Placed] = ()
    request_ids: Sequence[str] = ()
    new_blocks: Sequence[Tables | None] = ()
    replaced: AbstractSet[str] = frozenset()
    preempted: Collection[str] = ()
    ended: Collection[str] = ()
    touched: Sequence[int] = ()
    overwritten: Sequence[int] = ()
    states: States = field(default_factory=dict)


STEP_ON_SECONDS = 1.0
"""Seconds of further steps after the last request: an NVMe drive writes a full queue in this time.
vLLM's `LLM` gives an engine 5 s to end, the shortest time. Waiting blocks are written for 2.5 s of
them, so that the workers have 1.5 s."""


class IdleSteps:
    """Decides whether the engine steps without requests. Single-threaded.

    Copies end, and are reported, in steps. If an engine rested at once after its last request, it
    would neither write that request's last blocks to disk nor report that its queues are empty.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served_at: float | None = None

    def note(self, serves: bool) -> None:
        """Note that the engine has served a request, or that a step begins without any."""
        if serves or self._served_at is None:
            self._served_at = self._clock()

    def wanted(self, work: bool) -> bool:
        """Whether another step is needed: there is `work`, and no step has run yet or the last step
        with a request began less than `STEP_ON_SECONDS` ago."""
        if not work:
            return False
        return self._served_at is None or self._clock() - self._served_at < STEP_ON_SECONDS
