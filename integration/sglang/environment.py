# SPDX-License-Identifier: Apache-2.0
"""The Python that has SGLang: another one than that of vLLM, of tests and of nox."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_CHOSEN = "SGLANG_PYTHON"
_NOX = "NOX_CURRENT_SESSION"

FOR_ENGINES = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
"""Variables that every server is started with. SGLang keeps the last inputs of a convolution in 16
bits unless told otherwise: a prompt of a model in 32 bits would depend on its chunks."""

CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Of SGLang: cores of each rank. Unset, it refuses more ranks than there are NUMA nodes."""


class EnvironmentMissingError(RuntimeError):
    """There is no Python with SGLang; the message says how to get one."""


def python() -> Path:
    """The Python of `nox -s engine-sglang`, or the one that SGLANG_PYTHON names.

    Raises:
        EnvironmentMissingError: there is none.
    """
    chosen = os.environ.get(_CHOSEN)
    found = Path(chosen) if chosen else _ROOT / ".nox" / "engine-sglang" / "bin" / "python"
    if not found.is_file():
        source = f"from {_CHOSEN}" if chosen else "made by `nox -s engine-sglang`"
        raise EnvironmentMissingError(f"no Python with SGLang at {found} ({source})")
    return found


def python_path() -> str:
    """PYTHONPATH for processes of SGLang that import this project's tests and harness."""
    return os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))


def may_be_missing() -> bool:
    """Whether tests that need SGLang may be skipped: nox installs it before it runs tests."""
    return _NOX not in os.environ
