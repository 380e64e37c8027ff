# SPDX-License-Identifier: Apache-2.0
"""`python -m integration.quick`: the tests that concern a change, for `nox -s quick`.

They are the changed tests and, for a changed module, the tests whose names mirror it, the tests
that its mutants name, and the tests nearest to it by imports. Native code without mutants has the
tests that mutants of its folder name. `nox -s tests` alone runs tests that start an engine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from integration.importers import Importers
from mutants import entries

ROOT = Path(__file__).resolve().parents[1]

ALWAYS = ("docs/tests/test_import_graph.py", "docs/tests/test_file_sizes.py", "mutants/tests")
"""Tests of the whole tree; they take some seconds."""

_SOURCES = {
    "packages/flexkv/src/flexkv": "packages/flexkv/tests",
    "packages/flexkv-vllm/src/flexkv_vllm": "packages/flexkv-vllm/tests",
    "packages/flexkv-sglang/src/flexkv_sglang": "packages/flexkv-sglang/tests",
    "kernels/python/flexkv_kernels": "kernels/tests",
}
"""Folders of modules, and the folders of their tests."""

_UPSTREAM = ("@{upstream}", "origin/main", "main")
"""What a change is compared with: the first of these that exists."""


def changed_files(root: Path = ROOT) -> list[str]:
    """Files that differ from the branch that the work goes to, committed or not, as paths from
    `root`. Removed files are left out.

    Raises:
        subprocess.CalledProcessError: `root` is no checkout of git.
    """
    base = base_of_change(root)
    there = _git(root, "diff", "--name-only", "--diff-filter=d", base, check=True)
    return sorted({*there, *_git(root, "ls-files", "--others", "--exclude-standard", check=True)})


def base_of_change(root: Path = ROOT) -> str:
    """The commit that the work in `root` began at: its merge base with the main branch."""
    return next(
        (b[0] for name in _UPSTREAM if (b := _git(root, "merge-base", "HEAD", name))), "HEAD"
    )


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
        if _is_test(Path(file)):
            return [file]
        found = list(self._named.get(file, ()))
        if not found and not file.endswith(".py"):
            found += self._named.get(str(Path(file).parent), ())
        for source, tests in _SOURCES.items():
            if file.startswith(f"{source}/") and file.endswith(".py"):
                mirrors = _mirrors(Path(file), self._root / tests, self._root)
                found = [*sorted(mirrors), *found, *self._importers.tests_of(file)]
        return list(dict.fromkeys(found))


def concerned_tests(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Paths of the tests that concern these files, as paths from `root`."""
    tests = ConcernedTests(root)
    return sorted({*ALWAYS, *(test for file in changed for test in tests.of(file))})


def main(arguments: Sequence[str]) -> int:
    """Run pytest on the tests; `arguments` go to it, too. Returns its exit status."""
    changed = changed_files()
    print(f"{len(changed)} changed files: {' '.join(changed)}", flush=True)
    options = ["-q", "-n", "2", "-m", "not engine", *arguments]
    return subprocess.call(
        [sys.executable, "-m", "pytest", *options, *concerned_tests(changed)], cwd=ROOT
    )


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


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_") and path.suffix == ".py"


def _git(root: Path, *command: str, check: bool = False) -> list[str]:
    """Lines that git prints; none if it fails and `check` is not set."""
    done = subprocess.run(
        ["git", *command],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=None if check else subprocess.DEVNULL,
        text=True,
        check=check,
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
