# SPDX-License-Identifier: Apache-2.0
"""The Python files of an engine's wheel, in a folder that keeps them."""

from __future__ import annotations

import email.parser
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

METADATA = "METADATA"
_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35))
"""What the engines' wheels for Linux are built for; whichever machine this one is, since nothing of
them is run here."""


@dataclass(frozen=True, slots=True)
class Tree:
    """An engine's Python files.

    Attributes:
        path: the folder that holds its packages, and its metadata as METADATA.
        version: of the wheel.
    """

    path: Path
    version: str

    def pinned(self, name: str) -> str | None:
        """The version of the distribution `name` that the wheel insists on."""
        metadata = email.parser.Parser().parsestr((self.path / METADATA).read_text("utf-8"))
        for line in metadata.get_all("Requires-Dist") or []:
            requirement = Requirement(line)
            if requirement.name == name and "extra" not in str(requirement.marker or ""):
                match = re.fullmatch(r"==([^+]+)(\+\w+)?", str(requirement.specifier))
                if match is not None:
                    return match[1]
        return None


def fetch(distribution: str, version: str, cache: Path) -> Tree:
    """The files of a release, from the cache if it has them.

    Raises:
        subprocess.CalledProcessError: pip does not get the wheel; it has said why.
    """
    path = cache / f"{distribution}-{version}"
    if not path.is_dir():
        return _download(f"{distribution}=={version}", [], cache)
    return Tree(path, version)


def fetch_newest(distribution: str, cache: Path, index: str | None = None) -> Tree:
    """The files of the newest release, or of the newest build that the index at `index` has.

    Raises:
        subprocess.CalledProcessError: pip does not get the wheel; it has said why.
    """
    # That index alone: else pip would take the newest release for a build that it cannot get.
    options = [] if index is None else ["--pre", "--index-url", index]
    return _download(distribution, options, cache)


def unpack(wheel: Path, cache: Path) -> Tree:
    """Keep the Python files and the metadata of `wheel`."""
    name, version, _, _ = parse_wheel_filename(wheel.name)
    path = cache / f"{name}-{version}"
    if path.is_dir():
        return Tree(path, str(version))
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch, zipfile.ZipFile(wheel) as archive:
        unfinished = Path(scratch, "tree")
        names = archive.namelist()
        archive.extractall(unfinished, [file for file in names if file.endswith(".py")])
        info = next(file for file in names if file.endswith(f".dist-info/{METADATA}"))
        (unfinished / METADATA).write_bytes(archive.read(info))
        unfinished.rename(path)
    return Tree(path, str(version))


def _download(requirement: str, options: list[str], cache: Path) -> Tree:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # Not into pip's cache: a wheel is some hundred megabytes, and its Python files stay here.
        command += ["--no-cache-dir", "--only-binary", ":all:", "--python-version", "3.12"]
        for platform in _PLATFORMS:
            command += ["--platform", platform]
        subprocess.run([*command, *options, "--dest", folder, requirement], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return unpack(wheel, cache)
