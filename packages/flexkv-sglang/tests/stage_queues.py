# SPDX-License-Identifier: Apache-2.0
"""Messages between the stages of a pipeline within one process."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence

from flexkv_sglang.ranks import Ranks
from flexkv_sglang.stages import StageLinks

PATIENCE_SECONDS = 60.0


class Wires:
    """What the stages of one pipeline share.

    Args:
        stages: the number of stages.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.queues: defaultdict[tuple[int, int, int], queue.Queue[list[int]]] = defaultdict(
            queue.Queue
        )
        self.meeting = threading.Barrier(stages)
        self.errors: list[str | None] = [None] * stages


class QueuedLinks(StageLinks):
    """The links of one stage.

    Args:
        wires: of the pipeline.
        stage: number of this stage.

    Attributes:
        waits: whether a message may take some time; if not, waiting for one is an error.
        steps: calls of `step_begins`.
    """

    def __init__(self, wires: Wires, stage: int) -> None:
        self.stage, self.stages = stage, wires.stages
        self.last = wires.stages - 1
        self.waits = True
        self.steps = 0
        self._wires = wires

    def send(self, numbers: Sequence[int], stage: int, tag: int) -> None:
        self._wires.queues[self.stage, stage, tag].put(list(map(int, numbers)))

    def receive(self, count: int, stage: int, tag: int) -> list[int]:
        given = self._wires.queues[stage, self.stage, tag].get(
            block=self.waits, timeout=PATIENCE_SECONDS
        )
        assert len(given) == count
        return given

    def step_begins(self) -> None:
        self.steps += 1


class MeetingRanks(Ranks):
    """The ranks of all stages at the start.

    Args:
        wires: of the pipeline.
        stage: number of this stage.
    """

    def __init__(self, wires: Wires, stage: int) -> None:
        self.rank = stage
        self._wires = wires

    def first_error(self, text: str | None) -> tuple[int, str] | None:
        errors = self._wires.errors
        errors[self.rank] = text
        self._wires.meeting.wait(PATIENCE_SECONDS)
        first = next(((i, each) for i, each in enumerate(errors) if each is not None), None)
        self._wires.meeting.wait(PATIENCE_SECONDS)
        return first
