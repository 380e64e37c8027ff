# SPDX-License-Identifier: Apache-2.0
"""The lists fit the tree, and an entry that does not is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mutants import entries
from mutants.entries import Mutant

GOOD = Mutant("core", "twice_is_once", "twice.py", "2 * x", "x", ("test_twice.py::test_twice",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "twice.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "test_twice.py").write_text("def test_twice():\n    assert twice(2) == 4\n")
    return tmp_path


def test_every_list_fits_the_tree() -> None:
    mutants = entries.load()
    assert mutants
    assert entries.faults(mutants) == []


def test_an_entry_that_fits_has_no_faults(tree: Path) -> None:
    assert entries.faults([GOOD], tree) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": "Twice is once"}, "lower-case letters, digits and underscores"),
        ({"file": "thrice.py"}, "there is no thrice.py"),
        ({"find": "3 * x"}, "occurs 0 times"),
        ({"find": "t"}, "occurs 2 times"),
        ({"replace": "2 * x"}, "are the same"),
        ({"tests": ()}, "`tests` is empty"),
        ({"tests": ("test_thrice.py",)}, "there is no test_thrice.py"),
        ({"tests": ("test_twice.py::test_thrice",)}, "does not define test_thrice"),
        ({"tests": ("test_twice.py::test_twi",)}, "does not define test_twi"),
    ],
)
def test_what_does_not_fit_the_tree_is_named(
    tree: Path, change: dict[str, object], fault: str
) -> None:
    (found,) = entries.faults([dataclasses.replace(GOOD, **change)], tree)  # type: ignore[arg-type]
    assert found.startswith("core.toml, ")
    assert fault in found


def test_two_mutants_do_not_share_a_name(tree: Path) -> None:
    assert entries.faults([GOOD, GOOD], tree) == ["twice_is_once: 2 mutants have this name"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[[mutant]]\nname = 'a'", "missing keys"),
        ("[[mutant]]\nname='a'\nfile='b'\nfind='c'\nreplace='d'\ntests='e'", "array of strings"),
        ("[[mutant]]\nname='a'\nfile='b'\nfind='c'\nreplace=1\ntests=['e']", "must be strings"),
        ("[[mutant]]\nname='a'\nfile='b'\nfind='c'\nreplace='d'\ntests=[]\nwhy='e'", "unknown"),
        ("[[mutants]]\nname = 'a'", r"\[\[mutant\]\] tables and nothing else"),
        ("mutant", "core.toml: "),
    ],
)
def test_what_is_not_of_the_format_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "core.toml").write_text(text)
    with pytest.raises(ValueError, match=fault):
        entries.load(tmp_path)


def test_areas_and_patterns_choose() -> None:
    other = dataclasses.replace(GOOD, area="disk", name="half_is_once")
    both = [GOOD, other]
    assert entries.choose(both, [], []) == both
    assert entries.choose(both, ["disk"], []) == [other]
    assert entries.choose(both, [], ["twice*"]) == [GOOD]
    with pytest.raises(ValueError, match="area 'dusk'; allowed: core, disk"):
        entries.choose(both, ["dusk"], [])
    with pytest.raises(ValueError, match="no mutant's name fits 'twice_is_once'"):
        entries.choose(both, ["disk"], ["twice_is_once"])
