# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from compat_ci.wheels import Tree, fetch, fetch_newest, unpack

METADATA = """\
Metadata-Version: 2.4
Name: toy-engine
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.1.0; extra == "old"
"""


def make_wheel(folder: Path, version: str) -> Path:
    path = folder / f"toy_engine-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/__init__.py", "")
        archive.writestr("toy/core.abi3.so", b"\0" * 100)
        archive.writestr(
            f"toy_engine-{version}.dist-info/METADATA",
            METADATA.replace("Name: toy-engine", f"Name: toy-engine\nVersion: {version}"),
        )
        archive.writestr(f"toy_engine-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path, "1.2.0")


def test_python_files_and_metadata_are_kept(wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    tree = unpack(wheel, cache)
    assert tree.version == "1.2.0"
    kept = sorted(str(path.relative_to(tree.path)) for path in tree.path.rglob("*"))
    assert kept == ["METADATA", "toy", "toy/__init__.py"]
    assert list(cache.iterdir()) == [tree.path]
    assert unpack(wheel, cache) == tree


def test_what_is_in_the_cache_is_not_fetched(wheel: Path, tmp_path: Path) -> None:
    tree = unpack(wheel, tmp_path / "cache")
    assert fetch("toy-engine", "1.2.0", tmp_path / "cache") == tree


def test_the_build_of_the_day_comes_from_its_own_index(tmp_path: Path) -> None:
    project = tmp_path / "simple" / "toy-engine"
    project.mkdir(parents=True)
    names = [make_wheel(project, version).name for version in ("1.2.0", "1.3.0rc1.dev7")]
    (project / "index.html").write_text("".join(f'<a href="{name}">{name}</a>' for name in names))
    index = (tmp_path / "simple").as_uri()
    assert fetch_newest("toy-engine", tmp_path / "cache", index).version == "1.3.0rc1.dev7"
    with pytest.raises(subprocess.CalledProcessError):
        fetch_newest("no-such-engine", tmp_path / "cache", index)


def test_pins(wheel: Path, tmp_path: Path) -> None:
    tree: Tree = unpack(wheel, tmp_path / "cache")
    assert tree.pinned("torch") == "2.13.0"
    assert tree.pinned("numpy") is None
    assert tree.pinned("triton") is None
