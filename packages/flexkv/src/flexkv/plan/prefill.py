# SPDX-License-Identifier: Apache-2.0
"""The cost of computing a prompt, which a hit saves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The time that an engine takes to compute prompts.

    Attributes:
        per_token: seconds per token, wherever it is in the prompt.
        per_pair: further seconds for each earlier token that attention reads; 0 if unknown.
        source: the source of these figures, as text for the user.
    """

    per_token: float
    per_pair: float
    source: str

    def of_blocks(
        self, positions: npt.NDArray[np.int64], block_tokens: int
    ) -> npt.NDArray[np.float64]:
        """Seconds to compute the blocks at these positions of their prompts.

        Args:
            positions: int64 (blocks,), in blocks from the start of the prompt.
            block_tokens: tokens of a block.

        Returns:
            float64 (blocks,).
        """
        middle = (positions + 0.5) * block_tokens
        seconds = block_tokens * (self.per_token + self.per_pair * middle)
        return seconds.astype(np.float64)

    def of_range(self, start: int, stop: int) -> float:
        """Seconds to compute the tokens at positions `start` to `stop - 1` of a prompt."""
        return (stop - start) * (self.per_token + self.per_pair * (start + stop) / 2)
