# SPDX-License-Identifier: Apache-2.0
"""Objects of which nothing works, behind the calls of vLLM."""

from __future__ import annotations

from typing import Any


class BrokenError(Exception):
    """Nobody expects it."""


class Broken:
    """In place of an object of which nothing works."""

    def __getattr__(self, name: str) -> Any:
        raise BrokenError(name)


def raise_broken(*_: object) -> None:
    raise BrokenError


def public(*classes: type) -> set[str]:
    """The names that classes define for others."""
    return {name for kind in classes for name in vars(kind) if not name.startswith("_")}
