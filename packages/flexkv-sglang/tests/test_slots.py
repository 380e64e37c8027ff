# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexkv_sglang.slots import DeviceSlots

CPU = torch.device("cpu")
WAITS = {"aten::equal", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
"""Operators that make a thread wait for the device's result, beside copies to the host."""


class Waits(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function._schema.name in WAITS
        return function(*args, **(kwargs or {}))


def slots_of(pages: list[int], size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([page * size + i for page in pages for i in range(size)], dtype=dtype)


@pytest.mark.parametrize("size", [1, 4, 64])
def test_pages_of_all_pools_are_read(size: int) -> None:
    numbers = DeviceSlots(CPU)
    full, window, state = [7, 3, 9, 0], [5, 2], [11]
    assert numbers.read(
        [
            (slots_of(full, size), size),
            (slots_of(window, size, torch.int32), size),
            (torch.tensor(state, dtype=torch.int32), 1),
        ]
    ) == [full, window, state]
    assert numbers.read([(slots_of(full, size), size)]) == [full]
    assert numbers.read([(torch.arange(0), size), (torch.tensor(state), 1)]) == [[], state]
    assert numbers.read([(torch.arange(0), size)]) == [[]]


@pytest.mark.parametrize(
    "slots",
    [
        [0, 1, 2],
        [1, 2, 3, 4],
        [0, 1, 3, 2],
        [4, 5, 6, 7, 8, 9, 10, 12],
        [0, 1, 2, 7],
    ],
)
def test_slots_that_are_no_whole_pages_are_refused(
    slots: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    numbers = DeviceSlots(CPU)
    for pools in ([(torch.tensor(slots), 4)], [(slots_of([3], 4), 4), (torch.tensor(slots), 4)]):
        assert numbers.read(pools) is None
    assert "no whole pages" in caplog.text


def test_a_transfer_waits_once_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = 0
    tolist = torch.Tensor.tolist

    def copy(self: torch.Tensor) -> Any:
        nonlocal copies
        copies += 1
        return tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", copy)
    pools = [(slots_of([7, 3], 4), 4), (slots_of([5], 4), 4), (torch.tensor([2]), 1)]
    with Waits() as waits:
        assert DeviceSlots(CPU).read(pools) == [[7, 3], [5], [2]]
    assert (copies, waits.count) == (1, 0)


class Streams:
    """torch's streams, which only record what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._empty = torch.empty
        scheduler = SimpleNamespace(name="scheduler")
        own = SimpleNamespace(wait_stream=self._wait, record_event=self._record)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: scheduler)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(torch, "empty", self._empty_on_host)

    def _empty_on_host(self, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return self._empty(*args, **options)

    def _wait(self, stream: Any) -> None:
        self.calls.append(f"wait for {stream.name}")

    def _record(self) -> Any:
        self.calls.append("record")
        return SimpleNamespace(synchronize=lambda: self.calls.append("synchronize"))

    @contextlib.contextmanager
    def _enter(self, stream: Any) -> Any:
        self.calls.append("enter")
        yield
        self.calls.append("leave")


def test_on_a_gpu_a_stream_of_its_own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's stream has no method that could be called."""
    streams = Streams(monkeypatch)
    numbers = DeviceSlots(torch.device("cuda"))
    for pages in ([7, 3], [*range(100)], [1]):
        streams.calls.clear()
        assert numbers.read([(slots_of(pages, 4), 4), (torch.tensor([2]), 1)]) == [pages, [2]]
        assert streams.calls == ["wait for scheduler", "enter", "record", "leave", "synchronize"]
