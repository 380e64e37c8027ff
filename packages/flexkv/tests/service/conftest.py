# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from packages.flexkv.tests.service.served import Scheduler, Service


@pytest.fixture
def make_service(tmp_path: Path, at_end: ExitStack) -> Callable[..., Service]:
    """Makes services, and closes them."""
    numbers = count()

    def make(slots: int = 32, **settings: Any) -> Service:
        service = Service(tmp_path / f"{next(numbers)}", slots, **settings)
        return at_end.enter_context(closing(service))

    return make


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()


@pytest.fixture
def attach(at_end: ExitStack) -> Callable[..., Scheduler]:
    """Makes schedulers, and closes them."""

    def make(service: Service, **options: Any) -> Scheduler:
        return at_end.enter_context(closing(Scheduler(service.root, **options)))

    return make


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python programs that end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments]
        root = Path(__file__).parents[4]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stdin=subprocess.PIPE,
                text=True,
                pass_fds=pass_fds,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
            )
        )
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


@pytest.fixture
def with_disk(make_service: Callable[..., Service], tmp_path: Path) -> Service:
    """A service with memory for 16 blocks, and a disk."""
    return make_service(
        16,
        eviction_policy="lru",
        ssd_cache_gb=0.01,
        ssd_cache_dir=(str(tmp_path / "disk"),),
        ssd_timeout_seconds=60.0,
    )
