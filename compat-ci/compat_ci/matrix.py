# SPDX-License-Identifier: Apache-2.0
"""versions.toml as objects. Needs the standard library only: noxfile.py reads it, too."""

from __future__ import annotations

import enum
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ROOT / "compat-ci" / "versions.toml"


class Level(enum.IntEnum):
    """How far a version is tested; each level includes the ones before it."""

    STATIC = 1
    SCHEDULER = 2
    ENGINE = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, name: str) -> Level:
        """The level of that name; ValueError names the allowed ones."""
        for level in cls:
            if str(level) == name:
                return level
        raise ValueError(f"level {name!r}; allowed: {', '.join(map(str, cls))}")

    def upto(self) -> list[Level]:
        """This level and those that it includes, lowest first."""
        return [level for level in Level if level <= self]


@dataclass(frozen=True, slots=True)
class Release:
    """A version of an engine.

    Attributes:
        version: as on the package index.
        distribution: its name there.
        torch: what it pins; the static level compares that with the wheel.
        level: up to which it is tested.
        limits: what does not work, or why the level is not higher, a sentence or two each.
        accepted: findings of the static level that are known; part of their text, to the reason.
    """

    version: str
    distribution: str
    torch: str
    level: Level
    limits: tuple[str, ...]
    accepted: dict[str, str]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, the adapter that serves it, and the versions of both worlds.

    Attributes:
        name: of the section.
        package: what the engine is imported as.
        starts: which versions the adapter starts with, for people; `{oldest}` and `{newest}` stand
            for major and minor number of those that were served.
        adapter: directory of the adapter's package.
        uses: directories with what the adapter imports of ours.
        concerns: directories whose files a result is of. It is older once they have changed.
        callers: files of the engine, relative to where its package lies, that call us.
        nightly: package index with the engine's builds of the day; None if there is none.
        since: methods that the adapter overrides, and modules that it imports, that came later than
            the oldest release, to the version they came with.
        accepted: as in `Release`, for all of them.
        tests: what pytest runs at the levels above the static one, relative to the repository.
        releases: oldest first.
    """

    name: str
    package: str
    starts: str
    adapter: Path
    uses: tuple[Path, ...]
    concerns: tuple[Path, ...]
    callers: tuple[str, ...]
    nightly: str | None
    since: dict[str, str]
    accepted: dict[str, str]
    tests: dict[Level, tuple[str, ...]]
    releases: tuple[Release, ...]

    def release(self, version: str) -> Release:
        """The release of that version; ValueError names those there are."""
        for release in self.releases:
            if release.version == version:
                return release
        known = ", ".join(release.version for release in self.releases)
        raise ValueError(f"{self.name} {version} is not in {VERSIONS.name}; allowed: {known}")

    @property
    def served(self) -> tuple[Release, ...]:
        """Releases whose engine, or at least whose scheduler, has run with the adapter."""
        return tuple(release for release in self.releases if release.level > Level.STATIC)


def load(path: Path = VERSIONS) -> dict[str, Engine]:
    """All engines by name. KeyError or ValueError if the file is malformed."""
    with path.open("rb") as file:
        sections = tomllib.load(file)
    return {
        name: Engine(
            name=name,
            package=section["package"],
            starts=section["starts"],
            adapter=ROOT / section["adapter"],
            uses=tuple(ROOT / folder for folder in section["uses"]),
            concerns=tuple(ROOT / folder for folder in section["concerns"]),
            callers=tuple(section["callers"]),
            nightly=section.get("nightly"),
            since=section["since"],
            accepted=section["accepted"],
            tests={Level.parse(level): tuple(paths) for level, paths in section["tests"].items()},
            releases=tuple(
                Release(
                    version=release["version"],
                    distribution=release["distribution"],
                    torch=release["torch"],
                    level=Level.parse(release["level"]),
                    limits=tuple(section["limits"][key] for key in release.get("limits", ())),
                    accepted=release.get("accepted", {}),
                )
                for release in section["release"]
            ),
        )
        for name, section in sections.items()
    }
