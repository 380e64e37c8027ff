# SPDX-License-Identifier: Apache-2.0
"""A rank's part in its engine's cache: its pages and their device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flexkv.host.arena import Arena
from flexkv.layout import (
    KVLayout,
    PlacedPlane,
    Sharding,
    block_identity,
    fingerprint,
    share_of,
)
from flexkv.session import Shard
from flexkv.types.mover import Mover


class Device(Protocol):
    """The device that holds pages. flexkv-kernels has one for host memory and one for CUDA."""

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that the device is attached to; None if there is none or it is unknown."""
        ...

    def make_mover(
        self,
        planes: Sequence[PlacedPlane],
        stored: range,
        num_blocks: int,
        arena: Arena,
        threads: int,
    ) -> Mover:
        """Make the mover between pages on this device and an arena. The caller closes it.

        Args:
            planes: planes of the pages. Their memory must stay mapped until the mover is closed.
            stored: numbers of the planes that stores copy.
            num_blocks: engine blocks in each plane.
            arena: attached; must stay so until the mover is closed.
            threads: number of copying threads, if processors copy.

        Raises:
            ValueError: the mover refuses the planes.
        """
        ...

    def work_so_far(self) -> int:
        """The work that a copy submitted now must follow: `after` of `Mover.submit`."""
        ...


class PlacedPages(NamedTuple):
    """The pages of a layout, and their places in slots.

    Attributes:
        num_blocks: how many pages each plane has.
        planes: all planes.
        stored: numbers of the planes that this rank stores. Of ranks with the same bytes, each
            stores a share.
    """

    num_blocks: int
    planes: list[PlacedPlane]
    stored: range


@dataclass(frozen=True, slots=True)
class RankPages:
    """The pages of one rank, and which part of the engine's blocks they hold.

    Attributes:
        layout: the layout of the pages.
        engine_blocks: engine blocks of a FlexKV block.
        sharding: how the ranks of a stage divide a block.
        number: number of this rank within its stage.
        stage: number of its pipeline stage.
        stages: number of stages of the engine.
        apart: layouts of pages that the engine numbers apart, such as those of a sliding window. A
            page of each takes a slot.
    """

    layout: KVLayout
    engine_blocks: int
    sharding: Sharding
    number: int = 0
    stage: int = 0
    stages: int = 1
    apart: tuple[KVLayout, ...] = ()

    @property
    def num_blocks(self) -> int:
        """How many blocks the engine's pages are. Those of `layout` have the first numbers, then
        follow those of each in `apart`."""
        return sum(each.num_blocks for each in self._layouts)

    @property
    def rank(self) -> int:
        """Number of this rank in the engine."""
        return self.stage * self.sharding.ranks + self.number

    @property
    def ranks(self) -> int:
        """Ranks of the engine."""
        return self.stages * self.sharding.ranks

    def shard(self, identity: Sequence[str], numa_node: int | None) -> Shard:
        """The rank's message to the others.

        Args:
            identity: what determines the bytes of a block; `model` of `block_identity`.
            numa_node: node of the pages' device.
        """
        blocks, sharding = self.engine_blocks, self.sharding
        parts = block_identity(identity, self.layout, blocks, sharding, self.apart)
        return Shard(
            self.rank,
            fingerprint(parts),
            blocks,
            max(each.shard_bytes(blocks) for each in self._layouts),
            self.sharding.replicas,
            numa_node,
            stage=self.stage,
            identity=tuple(parts),
        )

    def place(self) -> list[PlacedPages]:
        """Place the pages of all layouts in slots. A rank's heads are at the same places in all
        slots."""
        stride = max(each.head_stride(self.engine_blocks) for each in self._layouts)
        replicas = self.sharding.replicas
        return [
            PlacedPages(
                each.num_blocks,
                *share_of(each.place(self.engine_blocks, stride), self.number % replicas, replicas),
            )
            for each in self._layouts
        ]

    @property
    def _layouts(self) -> tuple[KVLayout, ...]:
        return (self.layout, *self.apart)
