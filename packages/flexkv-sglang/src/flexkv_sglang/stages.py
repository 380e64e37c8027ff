# SPDX-License-Identifier: Apache-2.0
"""The stages of a pipeline (`--pp-size`), which hold different layers: their messages and loads.

SGLang runs a scheduler beside each rank of each stage. All of them make the same calls, the later
stages later: they get there with the results of the earlier ones. A stage never waits for a later
one within a call. The first stage decides, and each stage passes its decisions on to the next one,
as SGLang does for HiCache. A load has succeeded if it has on all stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    `group` is SGLang's of these ranks, whose messages are CPU tensors; borrowed."""

    def __init__(self, group: Any) -> None:
        self.stage: int = torch.distributed.get_rank(group)
        self.stages: int = torch.distributed.get_world_size(group)
        self.last = self.stages - 1
        self._group = group
        self._sent: deque[list[tuple[Any, torch.Tensor]]] = deque([[]])

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


@dataclass(frozen=True, slots=True)
class _Loading:
    """A request of SGLang that loads, and whether SGLang was to keep its pages out of the tree
    already."""

    request: Any
    kept_out: bool


class StagedLoads:
    """The requests whose load may have failed on another stage. Single-threaded.

    A stage computes a batch before the later stages load their layers for it, and SGLang may
    compute the next part of a prompt meanwhile. Until it is known that the load succeeded on all
    stages, which is when the result of the batch arrives, SGLang keeps the request's pages out of
    its tree. `failed`: ids of requests that SGLang is to abort; None if that is not decided now.
    """

    def __init__(self, links: StageLinks) -> None:
        self.failed: list[str] | None = None
        self.links = links
        self._queued: dict[str, _Loading] = {}
        self._computed: dict[int, list[_Loading]] = {}
        self._verdicts: deque[bool] = deque()

    def queued(self, request: Any) -> None:
        """A request loads in the next batch."""
        known = self._queued.get(request.rid)
        if known is None or known.request is not request:
            self._queued[request.rid] = _Loading(request, bool(request.skip_radix_cache_insert))
        request.skip_radix_cache_insert = True

    def computed(self, batch: int, rids: Iterable[str], landed: bool) -> None:
        """This stage has computed a batch with loads, or at least queued all of it. `landed`:
        whether all loads have succeeded on all ranks of this stage."""
        links, queued = self.links, self._queued
        self._queued = {}
        self._computed[batch] = [queued.pop(rid) for rid in rids if rid in queued]
        _let_in(queued.values())  # their loads were cancelled
        if links.stage:
            landed &= bool(links.receive(1, links.stage - 1, VERDICTS)[0])
        if links.stage < links.last:
            links.send([landed], links.stage + 1, VERDICTS)
            return
        self._verdicts.append(landed)
        for stage in range(links.last):
            links.send([landed], stage, VERDICTS)

    def has(self, batch: int) -> bool:
        """Whether the batch has loads whose verdict was not taken."""
        return batch in self._computed

    def take_verdict(self, batch: int) -> list[Any]:
        """The requests of a batch that SGLang must abort, because a load failed on a stage. Called
        on all stages when the result of the batch has arrived from the last one."""
        loading = self._computed.pop(batch)
        if self.links.stage == self.links.last:
            landed = self._verdicts.popleft()
        else:
            landed = bool(self.links.receive(1, self.links.last, VERDICTS)[0])
        if not landed:
            return [each.request for each in loading]
        _let_in(loading)
        return []


def _let_in(loading: Iterable[_Loading]) -> None:
    """SGLang may add the requests' pages to its tree."""
    for each in loading:
        each.request.skip_radix_cache_insert = each.kept_out
