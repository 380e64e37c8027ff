# SPDX-License-Identifier: Apache-2.0
"""Messages between the stages of a pipeline (`--pp-size`), which hold different layers.

SGLang runs a scheduler beside each rank of each stage. All of them make the same calls, the later
stages later: they get there with the results of the earlier ones. A stage never waits for a later
one within a call. The first stage decides, and each stage passes its decisions on to the next one,
as SGLang does for HiCache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

DECISIONS = int.from_bytes(b"FxDe")
VERDICTS = int.from_bytes(b"FxVe")
"""Tags of messages, which SGLang's own messages between stages have not."""

_KEPT_STEPS = 2
"""The next stage has received all messages of the step before the previous one: it passes SGLang's
own messages on, one step after the other."""


class StageLinks:
    """Messages between the ranks of a pipeline that have the same number in their stages.
    Single-threaded. A message is received without waiting, or once the other stage sends it.

    Args:
        group: SGLang's group of these ranks, whose messages are CPU tensors; borrowed.

    Attributes:
        stage: number of this stage, from 0.
        stages: the number of stages.
    """

    def __init__(self, group: Any) -> None:
        self.stage: int = torch.distributed.get_rank(group)
        self.stages: int = torch.distributed.get_world_size(group)
        self._group = group
        self._sent: deque[list[tuple[Any, torch.Tensor]]] = deque([[]])

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return self.stages - 1

    def send(self, numbers: Sequence[int], stage: int, tag: int) -> None:
        """Send 64-bit integers to another stage, without waiting for it."""
        message = torch.tensor(numbers, dtype=torch.int64)
        work = torch.distributed.isend(message, group=self._group, tag=tag, group_dst=stage)
        self._sent[-1].append((work, message))

    def receive(self, count: int, stage: int, tag: int) -> list[int]:
        """Wait for as many integers from another stage."""
        message = torch.zeros(count, dtype=torch.int64)
        torch.distributed.recv(message, group=self._group, tag=tag, group_src=stage)
        given: list[int] = message.tolist()
        return given

    def step_begins(self) -> None:
        """Forget what was sent before the previous step. Called once in each step."""
        self._sent.append([])
        while len(self._sent) > _KEPT_STEPS + 1:
            for work, _ in self._sent.popleft():
                work.wait()
