# SPDX-License-Identifier: Apache-2.0
"""The releases of an engine with which an adapter starts.

An adapter's distribution publishes its `Releases` under the entry point group `GROUP`, in a module
that imports no engine. `flexkv doctor` thus knows them without knowing any engine.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

GROUP = "flexkv.engine_releases"
"""Entry points of adapters; each loads as a tuple of `Releases`."""


class Age(enum.Enum):
    """An engine's version against the releases that an adapter is tested with."""

    OLDER = "older"
    """The adapter refuses it."""
    TESTED = "tested"
    NEWER = "newer"
    """The adapter starts if the engine has all features that FlexKV uses."""


@dataclass(frozen=True, slots=True)
class Releases:
    """A range of an engine's releases, both ends included.

    Attributes:
        runs: the part of the engine that runs FlexKV with them, as its users know it.
        oldest: the leading numbers of its version; as many as the adapter compares.
        newest: as many numbers; None if all releases from `oldest` on count as tested.
    """

    runs: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...] | None

    def age(self, version: str) -> Age:
        """Where a version lies, which is the engine's own text. One with fewer numbers than are
        compared, as of a development build ("dev"), is older than all."""
        release = self._release(version)
        if release < self.oldest:
            return Age.OLDER
        return Age.TESTED if self.newest is None or release <= self.newest else Age.NEWER

    def __str__(self) -> str:
        if self.newest is None:
            return f"{_dotted(self.oldest)} or newer"
        if self.newest == self.oldest:
            return _dotted(self.oldest)
        return f"{_dotted(self.oldest)} to {_dotted(self.newest)}"

    def _release(self, version: str) -> tuple[int, ...]:
        found = re.match(r"\d+(?:\.\d+)*", version)
        numbers = tuple(map(int, found[0].split("."))) if found else ()
        return numbers[: len(self.oldest)] if len(numbers) >= len(self.oldest) else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
