# SPDX-License-Identifier: Apache-2.0
"""The package and its metadata."""

from __future__ import annotations

import tomllib
from pathlib import Path

import flexkv_sglang


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    assert flexkv_sglang.__version__ == project["project"]["version"]
