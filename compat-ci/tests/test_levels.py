# SPDX-License-Identifier: Apache-2.0
"""A level passes only if something was tested and nothing failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compat_ci import matrix
from compat_ci.levels import run_release
from compat_ci.matrix import Engine, Level
from compat_ci.results import Outcome, Outcomes
from compat_ci.wheels import METADATA

TOY = "import pytest\ndef test_a(): assert {}\n@pytest.mark.skip\ndef test_b(): ...\n"


def run(tmp_path: Path, top: Level, code: str = "", pinned: str = "2.13.0") -> Outcomes:
    """Levels of a made-up engine without an adapter, whose scheduler level is `code`."""
    test = tmp_path / "test_toy.py"
    test.write_text(code, encoding="utf-8")
    adapter = tmp_path / "ours"
    adapter.mkdir()
    (adapter / "__init__.py").touch()
    vllm = matrix.load()["vllm"]
    toy: Engine = replace(
        vllm, package="toy", adapter=adapter, callers=(), tests={Level.SCHEDULER: (str(test),)}
    )
    release = replace(vllm.releases[0], distribution="toy", version="1.0", torch="2.13.0")
    tree = tmp_path / "cache" / "toy-1.0"
    tree.mkdir(parents=True)
    (tree / METADATA).write_text(f"Requires-Dist: torch=={pinned}\n", encoding="utf-8")
    return run_release(toy, release, top, tmp_path / "cache")


def scheduler(tmp_path: Path, code: str) -> Outcome:
    return run(tmp_path, Level.SCHEDULER, code)[Level.SCHEDULER]


def test_it_counts_what_passed(tmp_path: Path) -> None:
    outcome = scheduler(tmp_path, TOY.format("1 == 1"))
    assert outcome.passed
    assert outcome.checked == "1 tests, 1 skipped"


def test_it_names_what_failed(tmp_path: Path) -> None:
    outcome = scheduler(tmp_path, TOY.format("1 == 2"))
    assert not outcome.passed
    assert outcome.reasons == ["test_a: assert 1 == 2"]


@pytest.mark.parametrize(
    "code", ["", "import pytest\n@pytest.mark.skip\ndef test_b(): ...\n"], ids=["none", "skipped"]
)
def test_nothing_tested_is_a_failure(tmp_path: Path, code: str) -> None:
    outcome = scheduler(tmp_path, code)
    assert not outcome.passed
    assert "0 tests passed" in outcome.reasons[0]


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    outcome = scheduler(tmp_path, "import nothing_of_this_name\n")
    assert not outcome.passed
    assert "nothing_of_this_name" in outcome.reasons[0]


def test_no_level_is_run_above_one_that_fails(tmp_path: Path) -> None:
    outcomes = run(tmp_path, Level.SCHEDULER, TOY.format("1 == 1"), pinned="2.14.0")
    assert list(outcomes) == [Level.STATIC]
    said = "versions.toml says that it pins torch 2.13.0; it pins 2.14.0"
    assert outcomes[Level.STATIC].reasons == [said]


def test_levels_above_the_one_asked_for_are_not_run(tmp_path: Path) -> None:
    assert list(run(tmp_path, Level.STATIC)) == [Level.STATIC]


def test_a_name_that_nobody_has_looked_at_fails_the_static_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compat_ci.levels.unknown_names", lambda engine, tree: [tree.version])
    outcome = run(tmp_path, Level.STATIC, TOY.format("1 == 1"))[Level.STATIC]
    assert outcome.reasons == ["1.0"]
