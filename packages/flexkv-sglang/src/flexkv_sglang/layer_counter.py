# SPDX-License-Identifier: Apache-2.0
"""What SGLang's KV pools ask before a layer looks at its pages."""

from __future__ import annotations

from collections.abc import Callable


class LayerCounter:
    """SGLang's protocol of a counter of loaded layers.

    Args:
        num_layers: of the model.
        wait: lets the forward go on with a layer only when its pages are loaded.

    Attributes:
        num_layers: as given.
        consumer_index: the batch that computes, -1 if it needs no loads.
    """

    def __init__(self, num_layers: int, wait: Callable[[int], None]) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._wait = wait

    def set_consumer(self, index: int) -> None:
        """The next forward is of this batch."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Wait for the pages of layer `threshold`."""
        if self.consumer_index >= 0:
            self._wait(threshold)
