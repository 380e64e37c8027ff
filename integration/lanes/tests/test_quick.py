# SPDX-License-Identifier: Apache-2.0
"""Which tests `nox -s quick` runs for a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from integration.lanes.change import ROOT, changed_files
from integration.lanes.importers import Importers
from integration.lanes.quick import ALWAYS, TEST_SECONDS, concerned_tests, fitting
from integration.lanes.record import FileTimes


def test_a_module_is_tested_by_its_mirrors_its_importers_and_what_its_mutants_name() -> None:
    found = concerned_tests(["packages/flexkv/src/flexkv/tiers/disk/ledger.py"])
    assert "packages/flexkv/tests/tiers/disk/test_ledger.py" in found, "it mirrors the module"
    assert "packages/flexkv/tests/tiers/disk/test_disk_limits.py" in found, "a mutant names it"
    assert set(ALWAYS) <= set(found)


def test_a_test_may_have_the_name_of_the_folder() -> None:
    found = concerned_tests(["packages/flexkv/src/flexkv/eviction/policy.py"])
    assert "packages/flexkv/tests/eviction/test_eviction.py" in found


def test_native_code_is_tested_by_what_mutants_of_it_or_of_its_folder_name() -> None:
    tests = {
        "packages/flexkv/tests/index/test_block_index.py",
        "packages/flexkv/tests/index/test_block_index_model.py",
    }
    for file in ("kernels/src/index/table.hpp", "kernels/src/index/policy.hpp"):
        assert tests <= set(concerned_tests([file]))


def test_a_module_is_tested_by_the_nearest_of_its_importers(tmp_path: Path) -> None:
    sources, tests = tmp_path / "packages/flexkv/src/flexkv", tmp_path / "packages/flexkv/tests"
    for path, text in {
        sources / "base.py": "",
        sources / "middle.py": "from flexkv import base",
        sources / "top.py": "def f():\n    import flexkv.middle",
        tests / "world.py": "from flexkv.top import f",
        tests / "test_near.py": "import flexkv.middle",
        tests / "test_far.py": "from world import f",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    importers = Importers(tmp_path)
    near, far = (f"packages/flexkv/tests/test_{name}.py" for name in ("near", "far"))
    assert importers.tests_of("packages/flexkv/src/flexkv/base.py") == [near]
    assert importers.tests_of("packages/flexkv/src/flexkv/middle.py") == [near]
    assert importers.tests_of("packages/flexkv/src/flexkv/top.py") == [far]
    assert importers.tests_of("README.md") == []


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
    assert changed_files(checkout) == set()
    subprocess.run(["git", "checkout", "-q", "-b", "work"], cwd=checkout, check=True)
    checkout.joinpath("changed.py").write_text("changed")
    checkout.joinpath("removed.py").unlink()
    commit(checkout)
    checkout.joinpath("new.py").touch()
    assert changed_files(checkout) == {"changed.py", "new.py"}


def test_outside_a_checkout_git_says_why(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        changed_files(tmp_path)


def test_the_closest_tests_run_until_the_time_is_used() -> None:
    half = FileTimes(TEST_SECONDS / 2, 1.0, 1)
    files = dict.fromkeys(("a.py", "b.py", "c.py"), half)
    tests = [*ALWAYS, "a.py", "new.py", "b.py", "c.py", "short.py"]
    chosen, left_out = fitting(tests, files)
    assert chosen == [*ALWAYS, "a.py", "new.py", "b.py"]
    assert left_out == ["c.py", "short.py"], "none runs before one that is closer"


def test_one_test_runs_however_long_it_takes() -> None:
    slow = FileTimes(2 * TEST_SECONDS, 1.0, 1)
    chosen, left_out = fitting([*ALWAYS, "a.py", "b.py"], {"a.py": slow, "b.py": slow})
    assert (chosen, left_out) == ([*ALWAYS, "a.py"], ["b.py"])


def test_the_tests_closest_to_each_file_come_first() -> None:
    files = [f"packages/flexkv/src/flexkv/tiers/disk/{name}.py" for name in ("slabs", "table")]
    found = concerned_tests(files)[len(ALWAYS) :]
    assert {"test_slabs.py", "test_table.py"} <= {Path(test).name for test in found[:2]}
