# SPDX-License-Identifier: Apache-2.0
"""One name for one thing: of files within a package, and of classes in all packages.

The names below stand twice or more. The lists may only shrink: rename the newer file or class
instead of adding a name, and remove a name once it is unique.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGES = {
    path.name: path
    for path in Path(__file__).parents[2].glob("packages/*/src/*")
    if path.joinpath("__init__.py").is_file()
}

STEMS = {
    "flexkv": {"request": 2},
    "flexkv_sglang": {},
    "flexkv_vllm": {"events": 3},
}
"""For each package the stems of several files, and the number of these files."""

CLASSES = {
    "Answer": 2,
    "Job": 2,
    "Level": 2,
    "Outcome": 2,
    "Pages": 2,
    "Place": 2,
    "Report": 2,
    "Reservation": 2,
    "Source": 2,
    "_Pin": 2,
    "_Running": 2,
}
"""The names of several classes, and the number of these classes."""


def several(names: Iterable[str]) -> dict[str, int]:
    """The names that occur more than once."""
    return {name: number for name, number in sorted(Counter(names).items()) if number > 1}


def stems(package: Path) -> Iterable[str]:
    """The stems of the package's files that are looked for by their names."""
    return (file.stem for file in package.rglob("*.py") if not file.stem.startswith("__"))


def classes(package: Path) -> Iterable[str]:
    """The names of the package's classes."""
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_other_files_of_a_package_share_a_stem(package: str) -> None:
    assert several(stems(PACKAGES[package])) == STEMS[package]


def test_no_other_classes_share_a_name() -> None:
    assert several(name for path in PACKAGES.values() for name in classes(path)) == CLASSES


def test_a_second_file_and_a_second_class_are_found(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        tmp_path.joinpath(folder).mkdir()
        tmp_path.joinpath(folder, "__init__.py").touch()
        tmp_path.joinpath(folder, "store.py").write_text("class Store:\n    class Entry: ...\n")
    assert several(stems(tmp_path)) == {"store": 2}
    assert several(classes(tmp_path)) == {"Entry": 2, "Store": 2}
