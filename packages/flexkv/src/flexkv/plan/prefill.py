# SPDX-License-Identifier: Apache-2.0
"""What computing a prompt costs, and so what a hit saves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds that an engine takes to compute prompts.

    Attributes:
        per_token: seconds of a token, whatever came before it.
        per_pair: seconds more for each token that attention looks back at; 0 if not known.
        source: where the figures come from, for people.
    """

    per_token: float
    per_pair: float
    source: str

    def of_blocks(
        self, positions: npt.NDArray[np.int64], block_tokens: int
    ) -> npt.NDArray[np.float64]:
        """Seconds to compute the blocks at these positions of their prompts.

        Args:
            positions: int64 (blocks,), counted in blocks.
            block_tokens: tokens of a block.

        Returns:
            float64 (blocks,).
        """
        middle = (positions + 0.5) * block_tokens
        seconds = block_tokens * (self.per_token + self.per_pair * middle)
        return seconds.astype(np.float64)

    def of_range(self, start: int, stop: int) -> float:
        """Seconds to compute the tokens from position `start` to before `stop` of a prompt."""
        return (stop - start) * (self.per_token + self.per_pair * (start + stop) / 2)
