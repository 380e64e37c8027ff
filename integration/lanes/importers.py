# SPDX-License-Identifier: Apache-2.0
"""Who imports whom: the tests nearest to a module, and all files that a change reaches."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
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
    "packages",
    "packages/flexkv/tests",
    "packages/flexkv-vllm/tests",
    "packages/flexkv-sglang/tests",
    "kernels/tests",
)
"""Folders of tests and of the modules that tests share, imported by their last name."""

FROM_ROOT = ("integration", "mutants", "docs", "dashboards")
"""Folders of packages that are imported by their path from the root."""

MOST = 12
"""Tests of one module, those with most words of its path first. Not tuned."""


class Importers:
    """Who imports whom in the tree below `root`, read once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tests_of(self, file: str) -> list[str]:
        """The tests of packages and kernels nearest to `file`, directly or through the fewest
        other modules, as paths from the root, at most `MOST`; none for a file that is not
        imported."""
        seen = {file}
        level = {file}
        while level:
            level = {each for one in level for each in self._importers.get(one, ())} - seen
            level = {each for each in level if not each.startswith(FROM_ROOT)}
            if tests := [each for each in level if is_test(each)]:
                words = _words(file)
                return sorted(tests, key=lambda test: (-len(words & _words(test)), test))[:MOST]
            seen |= level
        return []

    def reached(self, files: Iterable[str]) -> set[str]:
        """`files`, and all that import one of them, directly or through others. Who imports a
        module imports the packages that it is in, too."""
        waiting = list(files)
        seen: set[str] = set()
        while waiting:
            if (file := waiting.pop()) not in seen:
                seen.add(file)
                waiting += self._importers.get(file, ())
                if file.endswith("/__init__.py"):
                    waiting += self._within(file)
        return seen

    def _within(self, package: str) -> set[str]:
        """All who import something in a package, whose `__init__.py` they run."""
        folder = package.removesuffix("__init__.py")
        inside = (found for file, found in self._importers.items() if file.startswith(folder))
        return set().union(*inside)

    @cached_property
    def _importers(self) -> dict[str, set[str]]:
        """Each file, and the files that import it."""
        modules = dict(self._modules())
        found: dict[str, set[str]] = {}
        for file in {*modules.values()}:
            for name in _imported(ast.parse(self.root.joinpath(file).read_text("utf-8"))):
                if name in modules:
                    found.setdefault(modules[name], set()).add(file)
        return found

    def _modules(self) -> Iterator[tuple[str, str]]:
        """Names of modules, and their files."""
        below = [(folder, self.root / folder, False) for folder in SOURCES]
        below += [(folder, self.root / folder, True) for folder in TESTS]
        below += [(folder, self.root, False) for folder in FROM_ROOT]
        for folder, base, shared in below:
            deep = not shared or folder != "packages"
            for path in self.root.joinpath(folder).glob("**/*.py" if deep else "*.py"):
                parts = path.relative_to(base).with_suffix("").parts
                dotted = ".".join(parts).removesuffix(".__init__")
                # Files of the same last name in several folders are told apart by the folder.
                name = path.stem if shared and not _is_ambiguous(path) else dotted
                yield name, str(path.relative_to(self.root))


def is_test(file: str) -> bool:
    """Whether pytest collects tests from a file."""
    name = file.rpartition("/")[2]
    return name.startswith("test_") and name.endswith(".py")


def _is_ambiguous(path: Path) -> bool:
    return path.stem == "conftest" or is_test(path.name)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of what may be modules; the imports in functions, too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{each.name}" for each in names)
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(name))]):
                yield name


def _words(file: str) -> set[str]:
    return set(file.removesuffix(".py").replace("/", "_").split("_"))
