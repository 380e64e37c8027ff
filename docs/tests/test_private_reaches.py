# SPDX-License-Identifier: Apache-2.0
"""Tests look at private parts of FlexKV less and less: each reach makes a rename dear."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("packages/*/src/**/*.py", "kernels/python/**/*.py")
TESTS = ("packages/*/tests/**/*.py", "packages/conftest.py", "kernels/tests/**/*.py")

PUBLIC = {"_replace"}
"""Names of the standard library's own: `NamedTuple._replace` is public."""

CEILING = 25
"""Reaches that are left. It may only fall: name what tests need in
`packages/inside.py` or a file like it, or give the class a public part."""


def private_names(root: Path) -> set[str]:
    """Names with one leading underscore that our classes and modules define."""
    found = set()
    for tree in _trees(root, SOURCES):
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    private = {name for name in found if name.startswith("_") and not name.endswith("__")}
    return private - PUBLIC


def reaches(root: Path) -> Iterator[str]:
    """Private names that tests take of other objects than their own `self`."""
    private = private_names(root)
    for tree in _trees(root, TESTS):
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    continue
                case ast.Attribute(attr=name) if name in private:
                    yield name


def _trees(root: Path, patterns: tuple[str, ...]) -> Iterator[ast.Module]:
    for pattern in patterns:
        for path in root.glob(pattern):
            yield ast.parse(path.read_text(encoding="utf-8"))


def test_tests_reach_into_private_parts_no_more_than_before() -> None:
    assert len(list(reaches(ROOT))) <= CEILING, (
        "a new reach: use or extend packages/inside.py or a file like it"
    )


def test_a_reach_is_found_where_the_name_is_ours(tmp_path: Path) -> None:
    for path, text in {
        "packages/a/src/a.py": "class A:\n    def _replace(self):\n        self._x = 1\n",
        "packages/a/tests/test_a.py": "self._x, a._x, a.b._x, a._replace, os._exit, a.__dict__",
    }.items():
        tmp_path.joinpath(path).parent.mkdir(parents=True)
        tmp_path.joinpath(path).write_text(text)
    assert list(reaches(tmp_path)) == ["_x", "_x"]
