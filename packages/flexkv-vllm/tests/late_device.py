# SPDX-License-Identifier: Apache-2.0
"""The engine without a model on a device that computes as late, and loads as early, as it may.

Each worker only launches the forward pass of a step. It runs when vLLM takes the result of the
step, or when a copy that follows it begins. Stores and loads run at once, behind the work that they
follow and nothing else. So a load that does not follow a step that still uses its blocks leaves
wrong bytes, which the next forward over these blocks finds.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from connector_rank import ConnectorRank
from engine_world import World
from patience import PATIENCE_SECONDS
from texts import Text
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from flexkv import Mover
from flexkv.engine.orders import EVERYTHING, CopyOrder
from flexkv.types.mover import MARKS, Direction, Status
from packages.inside_adapters import mover_of, set_mover

STREAM = 1
"""The handle of the stream that workers compute in."""


class LateStream:
    """Work of a worker, which runs in order and no sooner than it must."""

    def __init__(self) -> None:
        self.launched = 0
        self._work: deque[Callable[[], None]] = deque()

    def launch(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self.launched += 1

    def run_to(self, number: int) -> None:
        """Run the first `number` of all that was launched."""
        while len(self._work) > self.launched - number:
            self._work.popleft()()


class EarlyMover:
    """Copies behind the work that a transfer follows, at once."""

    def __init__(self, inner: Mover, stream: LateStream) -> None:
        self._inner = inner
        self._stream = stream
        self._marks: list[int] = []

    def submit(
        self,
        direction: Direction,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: int = 0,
        flag_address: int = 0,
        *,
        planes: range | None = None,
        mark: int = 0,
    ) -> int:
        if mark:
            assert len(self._marks) - MARKS < mark <= len(self._marks)
            self._stream.run_to(self._marks[mark - 1])
        elif after:
            assert after == STREAM
            self._stream.run_to(self._stream.launched)
        ticket = self._inner.submit(direction, blocks, offsets, 0, flag_address, planes=planes)
        assert self._inner.wait(ticket, PATIENCE_SECONDS) is Status.DONE
        return ticket

    def mark(self, stream: int) -> int:
        assert stream == STREAM
        self._marks.append(self._stream.launched)
        return len(self._marks)

    def hold(self, ticket: int, stream: int) -> Status:
        assert stream == STREAM
        return self.poll(ticket)

    def poll(self, ticket: int) -> Status:
        return self._inner.poll(ticket)

    def wait(self, ticket: int, timeout: float) -> Status:
        return self._inner.wait(ticket, timeout)

    def copy_seconds(self, ticket: int) -> float | None:
        return self._inner.copy_seconds(ticket)

    def bytes_by_way(self) -> Mapping[str, int]:
        return self._inner.bytes_by_way()

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True, kw_only=True)
class DeviceRank(ConnectorRank):
    """A rank whose forward passes run late.

    Attributes:
        stream: of its device.
        steps: how many it was told of.
        last_use: the last of them that uses a block of the engine, by block.
        loads: orders of loads, each with the step it came with and the last step that used its
            blocks when it began.
        running: whether a forward pass runs, not only begins.
    """

    stream: LateStream = field(default_factory=LateStream)
    steps: int = 0
    last_use: dict[int, int] = field(default_factory=dict)
    loads: list[tuple[CopyOrder, int, int]] = field(default_factory=list)
    running: bool = False

    def run(
        self, output: SchedulerOutput, texts: Mapping[str, Text], weights: bytes
    ) -> ModelRunnerOutput:
        self.steps += 1
        orders: Any = output.kv_connector_metadata
        if orders.step:
            assert orders.step == self.steps
        self._note_loads(orders.layerwise)
        # What workers do before a forward: the blocks are in use, and lose their bytes.
        beside = [*(output.new_block_ids_to_zero or ())]
        self.last_use.update(dict.fromkeys(beside, self.steps))
        self._note_loads(orders.loads.values())
        return ConnectorRank.run(self, output, texts, weights)

    def _note_loads(self, orders: Any) -> None:
        for order in orders:
            used = max((self.last_use.get(block, 0) for block in order.engine_blocks), default=0)
            assert used <= order.follows, (used, order)
            self.loads.append((order, self.steps, used))

    def forward(self, output: SchedulerOutput, texts: Mapping[str, Text], weights: bytes) -> None:
        self.wrong.clear()
        blocks = [b for each in output.num_scheduled_tokens for t in self.tables[each] for b in t]
        self.last_use.update(dict.fromkeys(blocks, self.steps))
        tables = copy.deepcopy(self.tables)
        for layer in self.pages:
            self.connector.wait_for_layer_load(layer)
        zeroed = output.new_block_ids_to_zero or ()

        def compute() -> None:
            for pages in self.pages.values():
                for block in zeroed:
                    pages[block].zero_()
            now, self.tables, self.running = self.tables, tables, True
            ConnectorRank.forward(self, output, texts, weights)
            self.tables, self.running = now, False
            assert not self.wrong, self.wrong

        self.stream.launch(compute)

    def wait_for_layer(self, name: str) -> None:
        assert self.running  # the stream has waited as the forward was launched


class DeviceWorld(World):
    """`World` over such workers. `HostMemory.work_so_far` must return `STREAM`."""

    finished = 0

    def _start_ranks(self, ranks: int, kv_cache_config: KVCacheConfig) -> Sequence[DeviceRank]:
        made = []
        for rank in super()._start_ranks(ranks, kv_cache_config):
            assert isinstance(rank, ConnectorRank)
            fields = {each.name: getattr(rank, each.name) for each in dataclasses.fields(rank)}
            late = DeviceRank(**fields)
            set_mover(late.side, EarlyMover(mover_of(late.side), late.stream))
            made.append(late)
        return made

    def finish_step(self) -> None:
        while self.steps[0].result is None:
            self._run_stage(self.steps[0])
        # vLLM reads the tokens that the step has sampled: the device has come so far.
        self.finished += 1
        for rank in self.ranks:
            assert isinstance(rank, DeviceRank)
            rank.stream.run_to(self.finished)
        super().finish_step()

    @property
    def loads(self) -> list[tuple[CopyOrder, int, int]]:
        return [load for rank in self.ranks if isinstance(rank, DeviceRank) for load in rank.loads]

    @property
    def ordered(self) -> list[tuple[int, int]]:
        """Steps of the loads that follow a known step, each with this one."""
        pairs = ((step, order.follows) for order, step, _ in self.loads)
        return [(step, follows) for step, follows in pairs if follows < EVERYTHING]
