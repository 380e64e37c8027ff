# SPDX-License-Identifier: Apache-2.0
"""`python -m integration.lanes.quick`: the tests nearest to a change, for `nox -s quick`.

They are the changed tests and, for a changed module, the tests whose names mirror it, the tests
that its mutants name, and the tests nearest to it by imports. Native code without mutants has the
tests that mutants of its folder name. The closest run first, as many as fit into the time by the
record; the others are named. `nox -s landing` alone runs tests that start an engine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from integration.lanes.change import ROOT, changed_files
from integration.lanes.importers import Importers, is_test
from integration.lanes.record import FileTimes, Record
from mutants import entries

ALWAYS = ("docs/tests/test_import_graph.py", "docs/tests/test_file_sizes.py", "mutants/tests")
"""Tests of the whole tree; they take some seconds."""

TEST_SECONDS = 60.0
"""Seconds of tests by the record, in two workers. Tuned on two cores, where ruff, mypy and the
start of pytest take 20 s of the minute that `nox -s quick` may take."""

_SOURCES = {
    "packages/flexkv/src/flexkv": "packages/flexkv/tests",
    "packages/flexkv-vllm/src/flexkv_vllm": "packages/flexkv-vllm/tests",
    "packages/flexkv-sglang/src/flexkv_sglang": "packages/flexkv-sglang/tests",
    "kernels/python/flexkv_kernels": "kernels/tests",
}
"""Folders of modules, and the folders of their tests."""


class ConcernedTests:
    """Finds the tests that concern a file, as paths from `root`."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._importers = Importers(root)
        self._named: dict[str, list[str]] = {}
        """What mutants name, of each file and, for native code, of each folder."""
        for mutant in entries.load(root / "mutants"):
            for place in (mutant.file, str(Path(mutant.file).parent)):
                self._named.setdefault(place, []).extend(t.split("::")[0] for t in mutant.tests)

    def of(self, file: str) -> list[str]:
        """Tests of one file, those that are most likely to notice a fault first."""
        if is_test(file):
            return [file]
        found = list(self._named.get(file, ()))
        if not found and not file.endswith(".py"):
            found += self._named.get(str(Path(file).parent), ())
        for source, tests in _SOURCES.items():
            if file.startswith(f"{source}/") and file.endswith(".py"):
                mirrors = _mirrors(Path(file), self._root / tests, self._root)
                exact = f"test_{Path(file).stem}"
                closest = sorted(mirrors, key=lambda test: (Path(test).stem != exact, test))
                found = [*closest, *found, *self._importers.tests_of(file)]
        return list(dict.fromkeys(found))


def concerned_tests(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Paths of the tests that concern these files, as paths from `root`: those that concern each
    file most come first."""
    tests = ConcernedTests(root)
    closest = chain.from_iterable(zip_longest(*map(tests.of, sorted(changed))))
    return list(dict.fromkeys([*ALWAYS, *filter(None, closest)]))


def fitting(tests: Sequence[str], files: Mapping[str, FileTimes]) -> tuple[list[str], list[str]]:
    """The first of `tests` that take `TEST_SECONDS` together by the record, at least one beside
    `ALWAYS`, and those that are left out. Tests that the record lacks take no time."""
    chosen: list[str] = []
    left_out: list[str] = []
    used = 0.0
    for test in tests:
        used += files[test].seconds if test in files else 0.0
        fits = used <= TEST_SECONDS or len(chosen) <= len(ALWAYS)
        (chosen if fits else left_out).append(test)
    return chosen, left_out


def main(arguments: Sequence[str]) -> int:
    """Run pytest on the tests; `arguments` go to it, too. Returns its exit status."""
    changed = sorted(changed_files())
    print(f"{len(changed)} changed files: {' '.join(changed)}", flush=True)
    tests, left_out = fitting(concerned_tests(changed), Record.committed().files)
    options = ["-q", "-n", "2", "-m", "not engine", *arguments]
    status = subprocess.call([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT)
    if left_out:
        print(f"left out, to stay within a minute: {' '.join(left_out)}")
    return status


def _mirrors(module: Path, tests: Path, root: Path) -> set[str]:
    """Tests of the module, by their names: they begin with the module's, or have only words of it
    and of its folder. A package's tests may be named after the package."""
    stem = module.parent.name if module.stem == "__init__" else module.stem
    words = {*stem.split("_"), module.parent.name}
    return {
        str(path.relative_to(root))
        for path in tests.rglob("test_*.py")
        if path.stem.startswith(f"test_{stem}") or words.issuperset(path.stem.split("_")[1:])
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
