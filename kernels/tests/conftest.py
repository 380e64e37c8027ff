# SPDX-License-Identifier: Apache-2.0
"""The fake CUDA driver, compiled once for all tests that use it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.tests.fake_cuda.fake_driver import FakeCuda, build

MakeFake = Callable[..., FakeCuda]


@pytest.fixture(scope="session")
def make_fake(tmp_path_factory: pytest.TempPathFactory) -> MakeFake:
    """Makes drivers: the dynamic linker gives each file, though a copy, a state of its own."""
    folder = tmp_path_factory.mktemp("fake-cuda")
    # One for all workers of a run.
    library = build(folder.parents["PYTEST_XDIST_WORKER" in os.environ] / "fake-cuda")
    numbers = itertools.count()

    def make(**configuration: Any) -> FakeCuda:
        path = Path(shutil.copy(library, folder / f"driver-{next(numbers)}.so"))
        return FakeCuda(path, **configuration)

    return make


@pytest.fixture
def fake(make_fake: MakeFake) -> FakeCuda:
    """A new driver of CUDA 13.0 for a device with bulk copies."""
    return make_fake()
