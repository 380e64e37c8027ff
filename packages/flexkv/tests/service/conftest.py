# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.flexkv.tests.service.served import Scheduler, Service


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Makes services, and closes them."""
    made: list[Service] = []

    def make(slots: int = 32, **settings: Any) -> Service:
        made.append(Service(tmp_path / f"{len(made)}", slots, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()


@pytest.fixture
def attach() -> Iterator[Callable[..., Scheduler]]:
    """Makes schedulers, and closes them."""
    made: list[Scheduler] = []

    def make(service: Service, **options: Any) -> Scheduler:
        made.append(Scheduler(service.root, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
