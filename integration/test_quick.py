# SPDX-License-Identifier: Apache-2.0
"""Which tests `nox -s quick` runs for a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from integration.quick import ALWAYS, ROOT, changed_files, concerned_tests


def test_a_module_is_tested_by_its_mirrors_and_by_the_concerned_tests_its_mutants() -> None:
    found = concerned_tests(["packages/flexkv/src/flexkv/tiers/disk/index.py"])
    assert "packages/flexkv/tests/test_index_model.py" in found
    assert "packages/flexkv/tests/tiers/test_slot_index.py" in found, "mutants name it"
    assert set(ALWAYS) <= set(found)


def test_native_code_is_tested_by_the_concerned_tests_its_mutants() -> None:
    found = concerned_tests(["kernels/src/index/table.hpp"])
    assert set(found) - set(ALWAYS) == {
        "packages/flexkv/tests/test_index.py",
        "packages/flexkv/tests/test_index_model.py",
    }


def test_all_tests_that_are_found_exist() -> None:
    sources = [str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src/**/*.py")]
    assert all(ROOT.joinpath(test).exists() for test in concerned_tests(sources))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for command in (
        ["init", "-q", "-b", "main"],
        ["config", "user.email", "a@example.org"],
        ["config", "user.name", "A"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    for name in ("kept.py", "changed.py", "removed.py"):
        tmp_path.joinpath(name).touch()
    commit(tmp_path)
    return tmp_path


def commit(checkout: Path) -> None:
    subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    subprocess.run(["git", "commit", "-q", "-m", "a change"], cwd=checkout, check=True)


def test_a_change_is_what_differs_from_main_committed_or_not(checkout: Path) -> None:
    assert changed_files(checkout) == []
    subprocess.run(["git", "checkout", "-q", "-b", "work"], cwd=checkout, check=True)
    checkout.joinpath("changed.py").write_text("changed")
    checkout.joinpath("removed.py").unlink()
    commit(checkout)
    checkout.joinpath("new.py").touch()
    assert changed_files(checkout) == ["changed.py", "new.py"]


def test_outside_a_checkout_git_says_why(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        changed_files(tmp_path)
