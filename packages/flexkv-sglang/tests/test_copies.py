# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from flexkv_sglang.copies import LayerCounter


def test_only_a_batch_with_loads_waits() -> None:
    waited: list[int] = []
    counter = LayerCounter(3, waited.append)
    counter.wait_until(0)
    counter.set_consumer(4)
    counter.wait_until(1)
    counter.set_consumer(-1)
    counter.wait_until(2)
    assert waited == [1]
    assert counter.num_layers == 3
