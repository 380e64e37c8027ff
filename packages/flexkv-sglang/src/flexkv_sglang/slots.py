# SPDX-License-Identifier: Apache-2.0
"""Reads the numbers of pages out of the tensors of slots that SGLang keeps on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

logger = logging.getLogger("flexkv.sglang")


class DeviceSlots:
    """Reads slots of all pools by one copy to the host.

    On a GPU the kernels and the copy have a stream of their own, so that nothing is added to the
    scheduler's stream, and the scheduler's thread waits once: for the work that makes the slots."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host = torch.empty(0, dtype=torch.int64)

    def read(self, wanted: Sequence[tuple[torch.Tensor, int]]) -> list[list[int]] | None:
        """For each pool the number of each page: its first slot divided by the slots of a page.
        None, and a line in the log, if the slots of a pool are no whole pages. `wanted` has for
        each pool token slots (a 1-D integer tensor) and the slots of a page."""
        if any(slots.numel() % size for slots, size in wanted):
            return self._refuse(wanted)
        counts = [slots.numel() // size for slots, size in wanted]
        if not sum(counts):
            return [[] for _ in wanted]
        filled = [each for each, count in zip(wanted, counts, strict=True) if count]
        whole, *numbers = self._to_host(filled, 1 + sum(counts))
        if not whole:
            return self._refuse(wanted)
        ends = [sum(counts[:i]) for i in range(1, len(counts) + 1)]
        return [numbers[end - count : end] for end, count in zip(ends, counts, strict=True)]

    @staticmethod
    def _refuse(wanted: Sequence[tuple[torch.Tensor, int]]) -> None:
        count = sum(slots.numel() for slots, _ in wanted)
        logger.error("SGLang named %d slots that are no whole pages: skipped", count)

    def _to_host(self, wanted: Sequence[tuple[torch.Tensor, int]], count: int) -> list[int]:
        """`_packed` on the host: `count` numbers."""
        if self._stream is None:
            packed: list[int] = _packed(wanted).tolist()
            return packed
        if self._host.numel() < count:
            self._host = torch.empty(2 * count, dtype=torch.int64, pin_memory=True)
        host = self._host[:count]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(_packed(wanted), non_blocking=True)
            copied = self._stream.record_event()
        copied.synchronize()
        numbers: list[int] = host.tolist()
        return numbers


def _packed(wanted: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """1 if all slots are whole pages and 0 if not, then the numbers of all pages."""
    numbers = []
    right = torch.ones(1, dtype=torch.bool, device=wanted[0][0].device)
    for slots, size in wanted:
        rows = slots.view(-1, size).to(torch.int64)
        pages = rows[:, 0] // size
        numbers.append(pages)
        if size > 1:
            steps = torch.arange(size, device=slots.device)
            right = right & (rows == (pages * size)[:, None] + steps).all()
    return torch.cat([right.to(torch.int64), *numbers])
