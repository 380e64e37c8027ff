# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from engine_world import MakeWorld, World
    from offloading_world import MakeOffloadingWorld, OffloadingWorld
    from served_world import MakeService

    from packages.flexkv.tests.service.served import Service

# All of the adapter is written against vLLM's own classes: without them there is nothing to test.
pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture(autouse=True)
def one_thread_computes() -> None:
    """Threads that share a tensor wait for one another: with other processes on the cores a step
    of the tests' engine takes a hundred times as long."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def log_reaches_pytest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Else the first test that starts FlexKV gives its log a handler, and keeps it from `caplog` in
    all later ones."""
    logger, handler = logging.getLogger("flexkv"), logging.NullHandler()
    monkeypatch.setattr(logger, "propagate", True)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def no_tier_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexKV does not wait for a tier that gives nothing for 20 ms, measures again what it has not
    measured for 30 s, gives a recording 2 s to end, and takes a service that owes an answer for 1 s
    for one that hangs. A busy machine takes as long for anything."""
    from patience import PATIENCE_SECONDS

    from flexkv.engine import recorder
    from flexkv.engine.choice import chooser, cost
    from flexkv.service import line

    monkeypatch.setattr(chooser, "_PROBE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(cost, "_TRUST_SECONDS", 10 * PATIENCE_SECONDS)
    monkeypatch.setattr(recorder, "_CLOSE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(line, "_SILENT_SECONDS", 10 * PATIENCE_SECONDS)


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Makes worlds over one directory, and closes them; `kind` is a subclass of `World`."""
    from engine_world import World

    worlds: list[World] = []

    def make(kind: type[World] = World, **options: Any) -> World:
        worlds.append(kind(tmp_path, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def make_offloading_world(tmp_path: Path) -> Iterator[MakeOffloadingWorld]:
    """As `make_world`, under vLLM's OffloadingConnector."""
    from offloading_world import OffloadingWorld

    worlds: list[OffloadingWorld] = []

    def make(**options: Any) -> OffloadingWorld:
        worlds.append(OffloadingWorld(tmp_path, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[MakeService]:
    """Makes services with memory for so many blocks, and closes them after the worlds: fixtures end
    in the reverse order of a test's arguments."""
    from served_world import make_service as make_one

    made: list[Service] = []

    def make(slots: int = 64, **settings: Any) -> Service:
        made.append(make_one(tmp_path / f"{len(made)}", slots, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
