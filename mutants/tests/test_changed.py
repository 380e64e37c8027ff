# SPDX-License-Identifier: Apache-2.0
"""Which mutants are made of a change, and which of its lines no test notices."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mutants import changed
from mutants.entries import Mutant
from mutants.verdicts import Result, Verdict

FOLDER = "packages/flexkv/src/flexkv"
FILE = f"{FOLDER}/halves.py"
TEST = "packages/flexkv/tests/test_halves.py"
OLD = "def half(x):\n    return x // 2\n"
NEW = "\n\ndef is_even(x):\n    return x % 2 == 0\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in (FOLDER, "packages/flexkv/tests", "mutants"):
        tmp_path.joinpath(folder).mkdir(parents=True)
    tmp_path.joinpath(FILE).write_text(OLD)
    tmp_path.joinpath(TEST).write_text("from flexkv.halves import half\n")
    for command in (
        ["init", "-q", "-b", "main"],
        ["config", "user.email", "a@example.org"],
        ["config", "user.name", "A"],
        ["add", "-A"],
        ["commit", "-q", "-m", "begin"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_only_changed_lines_have_mutants_and_the_tests_that_concern_their_file(
    checkout: Path,
) -> None:
    checkout.joinpath(FILE).write_text(OLD + NEW)
    checkout.joinpath(TEST).write_text("from flexkv.halves import half, is_even\n")
    assert changed.changed_lines("HEAD", checkout) == {FILE: {3, 4, 5, 6}}
    made = changed.make("HEAD", checkout)
    assert {(mutant.file, mutant.line, mutant.tests) for mutant in made} == {(FILE, 6, (TEST,))}
    assert "    return (x % 2 != 0)\n" in {
        mutant.replace.removeprefix(OLD + "\n\ndef is_even(x):\n") for mutant in made
    }
    assert all(mutant.find == OLD + NEW for mutant in made)


def test_a_removed_line_and_a_removed_file_have_none(checkout: Path) -> None:
    checkout.joinpath(FILE).write_text("def half(x):\n")
    assert changed.changed_lines("HEAD", checkout) == {FILE: set()}
    checkout.joinpath(FILE).unlink()
    assert changed.make("HEAD", checkout) == []


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("y = a < b", {"y = (a <= b)"}),
        ("y = é and b", {"y = (é or b)"}),
        ("y = not a", {"y = (a)"}),
        ("y = 3", {"y = (4)"}),
        ("y = False", {"y = (True)"}),
        ("return a", {"return None"}),
        ("return None", set()),
        ("if a: pass", {"if not a:\n    pass"}),
        ("a.close()", {"pass"}),
        ("raise a", {"pass"}),
        ("a.b += c", {"pass"}),
        ("a.b = c", {"pass"}),
        ("a = c", set()),
        ("a: Literal[3] = b", set()),
        ("'a text'", set()),
        ("logger.error('%d', a + 1)", set()),
    ],
)
def test_each_kind_of_fault(line: str, faults: set[str]) -> None:
    assert {text for _, text in changed.faults_of(line, {1})} == faults


def test_a_survivor_is_reported_by_file_and_line_with_its_difference() -> None:
    mutant = Mutant("changed", "line_2", FILE, OLD, OLD.replace("2", "3"), (), line=2)
    results = [Result(mutant, Verdict.SURVIVED, ""), Result(mutant, Verdict.KILLED, "")]
    assert changed.report(results) == (
        f"{FILE}:2: no test concerns the file\n-    return x // 2\n+    return x // 3"
    )
