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
        """Make the mover between pages on this device and an attached arena. The caller closes it;
        the memory of both must stay mapped until then. Stores copy the planes numbered `stored`.
        Each plane has `num_blocks` engine blocks. If processors copy, so many `threads` do. Raises
        ValueError if the mover refuses the planes."""
        ...

    def work_so_far(self) -> int:
        """The work that a copy submitted now must follow: `after` of `Mover.submit`."""
        ...


class PlacedPages(NamedTuple):
    """The pages of a layout, and their places in slots.

    This rank stores those of the planes at the places `stored`: of ranks with the same bytes, each
    stores a share. `first` is the number of the first page among the blocks of all layouts;
    `numbers` are those of the planes. `begin` and `share` are those of `ApartPages`.
    """

    layout: KVLayout
    planes: list[PlacedPlane]
    stored: range
    first: int
    numbers: range
    begin: float = 0.0
    share: float = 1.0


class ApartPages(NamedTuple):
    """Pages that the engine numbers apart from those of its blocks, such as those of a sliding
    window. A page takes a slot.

    Attributes:
        begin: which share of the model's layers comes before their first one, about.
        share: which share of the model's layers they span, about.
        is_own: whether they differ between ranks that hold the same bytes of a block.
    """

    layout: KVLayout
    begin: float = 0.0
    share: float = 1.0
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class RankPages:
    """The pages of one rank, and which part of the engine's blocks they hold.

    Attributes:
        engine_blocks: engine blocks of a FlexKV block.
        sharding: how the ranks of a stage divide a block.
        number: number of this rank within its pipeline stage.
        apart: the pages with numbers of their own.
    """

    layout: KVLayout
    engine_blocks: int
    sharding: Sharding
    number: int = 0
    stage: int = 0
    stages: int = 1
    apart: tuple[ApartPages, ...] = ()

    @property
    def num_blocks(self) -> int:
        """How many blocks the engine's pages are. Those of `layout` have the first numbers, then
        follow those of each in `apart`."""
        return sum(each.layout.num_blocks for each in self._parts)

    @property
    def rank(self) -> int:
        """Number of this rank in the engine."""
        return self.stage * self.sharding.ranks + self.number

    @property
    def ranks(self) -> int:
        """Ranks of the engine."""
        return self.stages * self.sharding.ranks

    def shard(self, identity: Sequence[str], numa_node: int | None) -> Shard:
        """The rank's message to the others. `identity` is all that determines the bytes of a block,
        `model` of `block_identity`; `numa_node` is that of the pages' device."""
        blocks, sharding = self.engine_blocks, self.sharding
        apart = [each.layout for each in self.apart]
        parts = block_identity(identity, self.layout, blocks, sharding, apart)
        return Shard(
            self.rank,
            fingerprint(parts),
            blocks,
            max(self._bytes_of(each) * self._copies_of(each) for each in self._parts),
            self.sharding.replicas,
            numa_node,
            stage=self.stage,
            identity=tuple(parts),
        )

    def place(self) -> list[PlacedPages]:
        """Place all pages in slots. A rank's heads are at the same places in all slots. Ranks that
        hold the same bytes of a block, and other bytes of other pages, have each a part of those
        slots."""
        stride = max(part.layout.head_stride(self.engine_blocks) for part in self._parts)
        replica, replicas = self.number % self.sharding.replicas, self.sharding.replicas
        placed: list[PlacedPages] = []
        first = plane = 0
        for part in self._parts:
            planes = part.layout.place(self.engine_blocks, 0 if part.is_own else stride)
            if part.is_own:
                start = replica * self._bytes_of(part)
                planes = [each._replace(slot_offset=start + each.slot_offset) for each in planes]
                stored = range(len(planes))
            else:
                planes, stored = share_of(planes, replica, replicas)
            numbers = range(plane, plane + len(planes))
            layout, begin, share, _ = part
            placed.append(PlacedPages(layout, planes, stored, first, numbers, begin, share))
            first, plane = first + layout.num_blocks, numbers.stop
        return placed

    @property
    def _parts(self) -> tuple[ApartPages, ...]:
        return (ApartPages(self.layout), *self.apart)

    def _bytes_of(self, part: ApartPages) -> int:
        """Bytes of this rank in a slot."""
        return part.layout.shard_bytes(self.engine_blocks)

    def _copies_of(self, part: ApartPages) -> int:
        """How many ranks have bytes of their own in the part of a slot that these share."""
        return self.sharding.replicas if part.is_own else 1
