# SPDX-License-Identifier: Apache-2.0
"""A rank's part in its engine's cache: its pages and their device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """

    layout: KVLayout
    engine_blocks: int
    sharding: Sharding
    number: int = 0
    stage: int = 0
    stages: int = 1

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
        parts = block_identity(identity, self.layout, self.engine_blocks, self.sharding)
        return Shard(
            self.rank,
            fingerprint(parts),
            self.engine_blocks,
            self.layout.shard_bytes(self.engine_blocks),
            self.sharding.replicas,
            numa_node,
            stage=self.stage,
            identity=tuple(parts),
        )

    def place(self) -> tuple[list[PlacedPlane], range]:
        """All planes with their places in a shard, and the numbers of the planes that this rank
        stores. Of ranks with the same bytes, each stores a part."""
        replicas = self.sharding.replicas
        return share_of(self.layout.place(self.engine_blocks), self.number % replicas, replicas)
