# SPDX-License-Identifier: Apache-2.0
"""The counter of loaded layers, which SGLang's KV pools ask before a layer reads its pages."""

from __future__ import annotations

from collections.abc import Callable


class LayerCounter:
    """SGLang's protocol of a counter of loaded layers.

    Args:
        num_layers: layers of the model on this rank.
        wait: called with a layer's number from 0; returns once the layer's pages are loaded.

    Attributes:
        num_layers: see above.
        consumer_index: number of the batch that computes; -1 if the batch has no loads.
    """

    def __init__(self, num_layers: int, wait: Callable[[int], None]) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._wait = wait

    def set_consumer(self, index: int) -> None:
        """Set the batch of the next forward pass; -1 for a batch without loads."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Wait until the pages of layer `threshold` are loaded."""
        if self.consumer_index >= 0:
            self._wait(threshold)
