# SPDX-License-Identifier: Apache-2.0
"""`python -m integration.quick`: the tests that concern a change, for `nox -s quick`.

They are the changed tests, the tests whose names mirror a changed module, and the tests that
mutants of a changed file name. Tests that start an engine are left out: `nox -s tests` runs them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    base = next(
        (b for name in _UPSTREAM if (b := _git(root, "merge-base", "HEAD", name))), ["HEAD"]
    )
    there = _git(root, "diff", "--name-only", "--diff-filter=d", *base, check=True)
    return sorted({*there, *_git(root, "ls-files", "--others", "--exclude-standard", check=True)})


def concerned_tests(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Paths of the tests that concern these files, as paths from `root`."""
    named: dict[str, set[str]] = {}
    for mutant in entries.load(root / "mutants"):
        named.setdefault(mutant.file, set()).update(test.split("::")[0] for test in mutant.tests)
    found = set(ALWAYS)
    for file in changed:
        found |= named.get(file, set())
        if _is_test(Path(file)):
            found.add(file)
        for source, tests in _SOURCES.items():
            if file.startswith(f"{source}/") and file.endswith(".py"):
                found |= _mirrors(Path(file), root / tests, root)
    return sorted(found)


def main(arguments: Sequence[str]) -> int:
    """Run pytest on the tests; `arguments` go to it, too. Returns its exit status."""
    changed = changed_files()
    print(f"{len(changed)} changed files: {' '.join(changed)}", flush=True)
    options = ["-q", "-n", "2", "-m", "not engine", *arguments]
    return subprocess.call(
        [sys.executable, "-m", "pytest", *options, *concerned_tests(changed)], cwd=ROOT
    )


def _mirrors(module: Path, tests: Path, root: Path) -> set[str]:
    """Tests of the module, by their names. A package's tests may be named after the package."""
    stems = [module.parent.name] if module.stem == "__init__" else [module.stem]
    found = {path for stem in stems for path in tests.rglob(f"test_{stem}*.py")}
    return {str(path.relative_to(root)) for path in found}


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
