# SPDX-License-Identifier: Apache-2.0
"""When blocks are stored, and which requests may fill one in a step."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from flexkv.adapter.request import TrackedRequest


class StoreTime(enum.Enum):
    """When blocks are copied out."""

    STEP = "step"
    """In the step that fills them. Needs to hear of preemptions before blocks are reused."""
    FINISH = "finish"
    """When the request has finished, while the engine holds its blocks. Safe without that."""


class FillCalendar:
    """Requests by the step in which a block of theirs is full if each computes one token a step.

    In a step a request that decodes computes one token or none: it is never full earlier. Those
    that compute more are looked at in every step.
    """

    def __init__(self) -> None:
        self._step = 0
        self._due: dict[int, dict[TrackedRequest, None]] = {}

    def watch(self, tracked: TrackedRequest, tokens: int) -> None:
        """A block of the request is full with so many more tokens, one at least, than it has after
        the last step that `take_due` was called for."""
        step = self._step + max(1, tokens)
        if tracked.due_step != step:
            tracked.due_step = step
            self._due.setdefault(step, {})[tracked] = None

    def take_due(
        self, scheduled: Mapping[str, int], requests: Mapping[str, TrackedRequest]
    ) -> list[TrackedRequest]:
        """Requests to look at in the next step, to `watch` again after that.

        Args:
            scheduled: tokens that the step computes, by request.
            requests: all that are tracked.
        """
        self._step += 1
        step = self._step
        due = [
            tracked
            for tracked in self._due.pop(step, ())
            if tracked.due_step == step and requests.get(tracked.id) is tracked
        ]
        if sum(scheduled.values()) > len(scheduled):
            several = [requests.get(each) for each, tokens in scheduled.items() if tokens > 1]
            due += [each for each in several if each is not None and each.due_step != step]
        return due
