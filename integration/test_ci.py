# SPDX-License-Identifier: Apache-2.0
"""What `.ci/run` makes of tests that fail, over a nox that runs pytest on a few tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOX = """#!/usr/bin/env bash
[ "$2" = landing ] || exit "${LINT:-0}"
shift 2
[ "${1:-}" = -- ] && shift
PYTHON -m pytest -n 1 --dist loadgroup "$@" tests
code=$?
echo "nox > Session landing was a run."
[ "$code" -eq 0 ] && exit 0
echo "nox > Command python -m pytest failed with exit code $code"
exit 1
"""
UNSTABLE = """
import pathlib
import pytest

@pytest.mark.xdist_group("tests:a b")
@pytest.mark.parametrize("name", ["a b", "c@d"])
def test_unstable(name):
    seen = pathlib.Path("seen" + name)
    assert seen.exists() or seen.touch()

def test_stable(): pass
"""
BROKEN = "def test_broken(): assert False"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tmp_path.joinpath(".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    nox = tmp_path / "nox"
    nox.write_text(NOX.replace("PYTHON", sys.executable))
    nox.chmod(0o700)
    tmp_path.joinpath("pytest.ini").write_text("[pytest]")
    tmp_path.joinpath("tests").mkdir()
    return tmp_path


def run(checkout: Path, **env: str) -> tuple[int, list[str]]:
    """Exit status and lines of a run."""
    done = subprocess.run(
        [checkout / ".ci" / "run"],
        cwd=checkout,
        env={**os.environ, "NOX": str(checkout / "nox"), "PYTHON": sys.executable, **env},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_what_passes_alone_is_listed_as_unstable(checkout: Path) -> None:
    checkout.joinpath("tests", "test_a.py").write_text(UNSTABLE)
    status, lines = run(checkout)
    assert status == 0
    assert lines[-3:-1] == [
        "unstable: tests/test_a.py::test_unstable[a b]",
        "unstable: tests/test_a.py::test_unstable[c@d]",
    ]
    assert "2 passed" in lines[-1]
    assert any("2 failed, 1 passed" in line for line in lines if line.startswith("before: "))


def test_what_fails_twice_fails(checkout: Path) -> None:
    checkout.joinpath("tests", "test_a.py").write_text(UNSTABLE + BROKEN)
    status, lines = run(checkout)
    assert status == 1
    assert [line for line in lines if line.startswith("unstable: ")] == [
        "unstable: tests/test_a.py::test_unstable[a b]",
        "unstable: tests/test_a.py::test_unstable[c@d]",
    ]
    assert "1 failed, 2 passed" in lines[-1]


def test_a_file_that_cannot_be_read_fails(checkout: Path) -> None:
    checkout.joinpath("tests", "test_a.py").write_text(UNSTABLE)
    checkout.joinpath("tests", "test_b.py").write_text("import no_such_module")
    status, lines = run(checkout)
    assert status == 1
    assert not any(line.startswith("unstable: ") for line in lines)
    assert "1 error" in lines[-1]


def test_a_run_that_ends_by_itself_fails_and_is_not_repeated(checkout: Path) -> None:
    checkout.joinpath("tests", "test_a.py").write_text(UNSTABLE)
    checkout.joinpath("tests", "test_b.py").write_text(
        "import pytest\ndef test_end(): pytest.exit('ended', 3)"
    )
    status, lines = run(checkout)
    assert status == 1
    assert not any(line.startswith("before: ") for line in lines)


def test_lint_that_fails_is_never_repeated(checkout: Path) -> None:
    checkout.joinpath("tests", "test_a.py").write_text("def test_stable(): pass")
    status, lines = run(checkout, LINT="1")
    assert status == 1
    assert lines[-2] == "lint failed: see above"
    assert "1 passed" in lines[-1]
