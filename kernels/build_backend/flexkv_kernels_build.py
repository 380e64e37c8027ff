# SPDX-License-Identifier: Apache-2.0
"""The build backend: scikit-build-core, and NVIDIA's compiler where the machine has none.

Machines with a GPU rarely have nvcc, and a build without it has no CUDA mover. So a build for Linux
on x86-64 or arm64 takes nvcc from PyPI, for the time of the build, unless one that works is on the
machine. ``-C cmake.define.FLEXKV_CUDA=OFF`` leaves CUDA out, and then nothing is fetched.
"""

from __future__ import annotations

import sys

import cuda_compiler
from scikit_build_core import build as _backend
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.builder.get_requires import GetRequires

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str]]


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """What a build needs to be installed first."""
    found = _backend.get_requires_for_build_wheel(config_settings)
    return [*found, *cuda_compiler.required(_defined(config_settings))]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """The same for an editable install."""
    found = _backend.get_requires_for_build_editable(config_settings)
    return [*found, *cuda_compiler.required(_defined(config_settings))]


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel into `wheel_directory` and return its name."""
    return _backend.build_wheel(wheel_directory, _decided(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The same for an editable install."""
    return _backend.build_editable(wheel_directory, _decided(config_settings), metadata_directory)


def _defined(settings: Settings | None) -> dict[str, str]:
    """CMake's definitions, from the command line, the environment and pyproject.toml."""
    found = GetRequires.from_config_settings(settings or {}, state="wheel").settings.cmake.define
    return {name: str(value) for name, value in found.items()}


def _decided(settings: Settings | None) -> Settings:
    """The settings, with CUDA demanded or left out unless the user has decided that."""
    try:
        added = cuda_compiler.definitions(_defined(settings))
    except cuda_compiler.NoCompilerError as error:
        sys.exit(str(error))
    return (settings or {}) | {f"cmake.define.{name}": value for name, value in added.items()}
