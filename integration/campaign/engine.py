# SPDX-License-Identifier: Apache-2.0
"""What a campaign needs of an engine. `vllm` and `sglang` have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from integration.campaign.clients import Wire
from integration.campaign.counts import Counts
from integration.campaign.faults import Hit, Kind
from integration.campaign.prompts import Question
from integration.campaign.stores import SharedStores
from integration.campaign.verdict import Check, OnFailedLoad

ORDERS, DISK = "orders", "disk"
"""Folders in that of a campaign."""


class Server(Protocol):
    """A server under test; a context manager that ends it. Methods may be called from any thread.

    Attributes:
        address: host and port.
        group: id of its process group.
        alive: whether it has not ended.
    """

    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def group(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def metrics(self) -> str:
        """What Prometheus would scrape."""
        ...

    def log(self) -> str:
        """All that it has printed so far."""
        ...

    def step(self) -> None:
        """Have it compute something that is not cached, so that it tells what it has counted."""
        ...

    def forget(self) -> None:
        """Empty the engine's own cache, once none of it is in use."""
        ...

    def forget_all(self) -> None:
        """Empty FlexKV's, whatever is in use. Only where RESET is among the kinds of faults."""
        ...


class Engine(Protocol):
    """An engine that a campaign can be made with.

    Attributes:
        policies: what it does about loads that fail, by the names of the command line.
        kinds: of faults that come.
        wire: see `Wire`.
        prefix: of the names of its metrics.
        taken_out: its counter of requests that left the running batch, without prefix.
        block_bytes: of a FlexKV block.
        hit_tokens: a hit of a whole prompt ends at a multiple of these.
        blocks_of_hit: FlexKV blocks that a hit loads at most for each block of its tokens: several
            if the model has windows. Such a hit is loaded as a whole or not at all, so a prompt
            with damaged blocks is seldom one.
    """

    policies: Mapping[str, OnFailedLoad]
    kinds: Sequence[Kind]
    wire: Wire
    prefix: str
    taken_out: str
    block_bytes: int
    hit_tokens: int
    blocks_of_hit: int

    def reference(self, folder: Path, seed: int) -> list[Question]:
        """Prompts, and what the engine answers without FlexKV."""
        ...

    def starter(
        self,
        folder: Path,
        own_folder: Path,
        policy: str,
        ranks: int,
        stores: SharedStores | None,
    ) -> Callable[[Path], Server]:
        """Starts servers with FlexKV, one at a time, each with its log.

        Args:
            folder: of the checkpoint.
            own_folder: of all else.
            policy: one of `policies`.
            ranks: tensor-parallel ones.
            stores: below the disk, or none.
        """
        ...

    def warnings(self, log: str) -> Iterable[str]:
        """What FlexKV warned of."""
        ...

    def check(
        self,
        counts: Counts,
        given: Counter[Kind],
        hits: Sequence[Hit],
        policy: str,
        ranks: int,
    ) -> Iterable[Check]:
        """FlexKV counts what was done to it, and its counters fit one another and the engine's."""
        ...
