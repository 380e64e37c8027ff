# SPDX-License-Identifier: Apache-2.0
"""What `import flexkv` gives, and what it does not take."""

from __future__ import annotations

import subprocess
import sys

import flexkv

HEAVY = ("numpy", "torch", "vllm", "sglang", "flexkv_kernels", "rich")


def test_every_public_name_is_there() -> None:
    assert [name for name in flexkv.__all__ if not hasattr(flexkv, name)] == []
    assert len(flexkv.__all__) <= 18


def test_importing_it_imports_nothing_heavy() -> None:
    script = f"import sys, flexkv; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert loaded.split() == []
