# SPDX-License-Identifier: Apache-2.0
"""Skips the tests of this folder, with the reason, where they cannot run."""

from __future__ import annotations

import pytest

from flexkv_kernels import cuda_unavailable


def _why_not() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return cuda_unavailable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent.name == "gpu"]
    reason = _why_not() if here else None
    if reason is not None:
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))
