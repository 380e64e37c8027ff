# SPDX-License-Identifier: Apache-2.0
"""The stages of a pipeline, which hold different layers.

The parts of a block lie side by side in its slot: all heads of the first stage's layers, then those
of the next stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Place(NamedTuple):
    """A worker's number among the tensor-parallel ranks of its stage, and its stage."""

    rank: int
    stage: int = 0

    @classmethod
    def here(cls) -> Place:
        """The place of this process."""
        return cls(get_tp_group().rank_in_group, get_pp_group().rank_in_group)


@dataclass(frozen=True, slots=True)
class Stages:
    """How vLLM distributes a model's layers over stages.

    Attributes:
        count: number of stages.
        layers: layers of the whole model.
    """

    count: int
    layers: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Stages:
        """The stages of an engine."""
        return cls(
            vllm_config.parallel_config.pipeline_parallel_size,
            vllm_config.model_config.get_total_num_hidden_layers(),
        )

    def total_bytes(self, stage_bytes: int, stage: int) -> int:
        """Bytes of the layers of all stages, if all layers have the same size. Every stage computes
        the same number without a message from the others.

        Args:
            stage_bytes: bytes of the layers of one stage.
            stage: number of that stage.
        """
        if self.count == 1:
            return stage_bytes
        first, end = get_pp_indices(self.layers, stage, self.count)
        held: int = max(1, end - first)
        return stage_bytes * self.layers // held

    def describe(self, layers: Iterable[str]) -> list[str]:
        """The layers of a stage, for the fingerprint; empty if the stage has all layers."""
        return [] if self.count == 1 else [f"layers of the stage: {', '.join(layers)}"]
