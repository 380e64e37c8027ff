# SPDX-License-Identifier: Apache-2.0
"""The Python of the clients: another one than that of vLLM, of tests and of nox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_CHOSEN = "CLIENTS_PYTHON"
_NOX = "NOX_CURRENT_SESSION"


def python() -> Path:
    """The Python of `nox -s clients`, or the one that CLIENTS_PYTHON names. If there is none, the
    test is skipped, but fails under nox, which installs it first."""
    chosen = os.environ.get(_CHOSEN)
    found = Path(chosen) if chosen else _ROOT / ".nox" / "clients" / "bin" / "python"
    if not found.is_file():
        missing = f"no Python with Dynamo at {found} (made by `nox -s clients`)"
        if _NOX in os.environ:
            pytest.fail(missing)
        pytest.skip(missing)
    return found
