# SPDX-License-Identifier: Apache-2.0
"""The native parts of FlexKV. They lie above the core, which therefore finds them by name."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from flexkv.errors import ConfigError


def kernels(name: str) -> ModuleType:
    """The module of this name in the package `flexkv_kernels`.

    Raises:
        ConfigError: the package is not installed, or does not fit.
    """
    try:
        return import_module(f"flexkv_kernels.{name}")
    except ImportError as error:
        raise ConfigError(
            f"the kernels are not installed ({error}); allowed: pip install flexkv-kernels"
        ) from None
