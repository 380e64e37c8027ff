# SPDX-License-Identifier: Apache-2.0
"""The tests that import a module, directly or through the fewest other modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

SOURCES = (
    "packages/flexkv/src",
    "packages/flexkv-vllm/src",
    "packages/flexkv-sglang/src",
    "kernels/python",
)
"""Folders of importable packages."""

TESTS = (
    "packages/flexkv/tests",
    "packages/flexkv-vllm/tests",
    "packages/flexkv-sglang/tests",
    "kernels/tests",
)
"""Folders of tests and of the modules that tests share, imported by their last name."""

MOST = 12
"""Tests of one module, those with most words of its path first. Not tuned."""


class Importers:
    """Who imports whom in the tree below `root`, read once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def tests_of(self, file: str) -> list[str]:
        """The tests nearest to `file`, as paths from the root, at most `MOST`; none for a file
        that is not imported."""
        seen = {file}
        level = {file}
        while level:
            level = {each for one in level for each in self._importers.get(one, ())} - seen
            if tests := [each for each in level if _is_test(each)]:
                words = _words(file)
                return sorted(tests, key=lambda test: (-len(words & _words(test)), test))[:MOST]
            seen |= level
        return []

    @cached_property
    def _importers(self) -> dict[str, set[str]]:
        """Each file, and the files that import it."""
        modules = dict(self._modules())
        found: dict[str, set[str]] = {}
        for file in {*modules.values()}:
            for name in _imported(ast.parse(self._root.joinpath(file).read_text("utf-8"))):
                if name in modules:
                    found.setdefault(modules[name], set()).add(file)
        return found

    def _modules(self) -> Iterator[tuple[str, str]]:
        """Names of modules, and their files."""
        for folder, shared in (*((f, False) for f in SOURCES), *((f, True) for f in TESTS)):
            for path in self._root.joinpath(folder).rglob("*.py"):
                parts = path.relative_to(self._root / folder).with_suffix("").parts
                dotted = ".".join(parts).removesuffix(".__init__")
                # Files of the same last name in several folders are told apart by the folder.
                name = path.stem if shared and not _is_ambiguous(path) else dotted
                yield name, str(path.relative_to(self._root))


def _is_ambiguous(path: Path) -> bool:
    return path.stem == "conftest" or _is_test(path.name)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of what may be modules; the imports in functions, too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{each.name}" for each in names)


def _words(file: str) -> set[str]:
    return set(file.removesuffix(".py").replace("/", "_").split("_"))


def _is_test(file: str) -> bool:
    return Path(file).name.startswith("test_")
