# SPDX-License-Identifier: Apache-2.0
"""Imports FlexKV's native modules. They depend on the core, so the core imports them by name."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from flexkv.types.errors import ConfigError


def kernels(name: str) -> ModuleType:
    """Import a module of the package `flexkv_kernels`. Raises ConfigError if that fails."""
    try:
        return import_module(f"flexkv_kernels.{name}")
    except ImportError as error:
        raise ConfigError(
            f"the kernels are not installed ({error}); allowed: pip install flexkv-kernels"
        ) from None
