# SPDX-License-Identifier: Apache-2.0
"""The manager's orders to the workers, in vLLM's own transfer jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(slots=True)
class ArenaBlocks(LoadStoreSpec):
    """FlexKV's end of a job.

    Attributes:
        cell: where the ranks report on the completion board; None if there is nothing to copy. A
            load without a cell has failed, because its blocks are missing.
        slots: one for each block of the job, in the order of its keys.
    """

    cell: int | None = None
    slots: Sequence[int] = ()
