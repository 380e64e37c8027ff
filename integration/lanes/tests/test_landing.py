# SPDX-License-Identifier: Apache-2.0
"""Which tests run before a change lands."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from integration.lanes import landing
from integration.lanes.change import ROOT
from integration.lanes.choose import UNFIT
from integration.lanes.importers import Importers
from integration.lanes.landing import Lane, Nightly, Room, Rules, files_of_tests, left_out
from integration.lanes.record import FileTimes, Record
from mutants import entries

CORE = "packages/flexkv/src/flexkv"
RULES = Rules(
    whole=("conftest.py", "build/"),
    harmless=("docs/", "*.md"),
    rooms=(
        Room(("integration/tests/test_*.py",), ("native/",), ("packages/flexkv-vllm/src/",)),
        Room(("packages/flexkv/tests/*.py",), ("packages/flexkv/",)),
    ),
    nightly=(Nightly("integration/tests/test_kinds.py::*", ("*::test_kind[a b]",), ()),),
)
TREE = {
    f"{CORE}/index.py": "",
    f"{CORE}/lazy.py": "",
    f"{CORE}/cli.py": "from flexkv import index",
    "packages/flexkv-vllm/src/flexkv_vllm/connector.py": (
        "from flexkv import index\nfrom importlib import import_module\n"
        "import_module('flexkv.lazy')"
    ),
    "packages/flexkv/tests/test_index.py": "",
    "integration/tests/shared.py": "",
    "integration/tests/test_kinds.py": "from integration.tests import shared",
    "integration/tests/test_others.py": "",
    "docs/tests/test_docs.py": "",
}
KINDS = [f"integration/tests/test_kinds.py::test_kind[{name}]" for name in ("a b", "b/c", "d")]
OTHERS, DOCS = "integration/tests/test_others.py::test_other", "docs/tests/test_docs.py::test_doc"
INDEX = "packages/flexkv/tests/test_index.py::test_index"
TESTS = [*KINDS, OTHERS, DOCS, INDEX]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "ran"),
    [
        ([], [DOCS]),
        (["README.md", "docs/page"], [DOCS]),
        ([f"{CORE}/cli.py"], [DOCS, INDEX]),
        ([f"{CORE}/index.py"], [KINDS[0], OTHERS, DOCS, INDEX]),
        ([f"{CORE}/lazy.py"], [KINDS[0], OTHERS, DOCS, INDEX]),
        ([f"{CORE}/removed.py"], [DOCS, INDEX]),
        (["native/a.cpp"], [KINDS[0], OTHERS, DOCS]),
        (["integration/tests/test_kinds.py"], [*KINDS, DOCS]),
        (["integration/tests/shared.py", f"{CORE}/cli.py"], [*KINDS, DOCS, INDEX]),
        (["conftest.py"], TESTS),
        (["build/a/b"], TESTS),
        (["native/a.cpp", "new/file.py"], TESTS),
        (["packages/other.txt"], TESTS),
    ],
)
def test_the_tests_run_that_a_change_concerns(
    tree: Path, changed: list[str], ran: list[str]
) -> None:
    lane = Lane.of(changed, RULES, Importers(tree))
    assert [test for test in TESTS if not lane.leaves_out(test)] == ran
    assert bool(lane.whole) == (ran == TESTS)
    again = Lane.from_plain(lane.to_plain())
    assert again == lane


def test_a_whole_file_is_named_by_its_name_and_a_part_by_its_tests() -> None:
    assert [*left_out([*KINDS[1:], INDEX], [KINDS[0], DOCS])] == [
        *KINDS[1:],
        "packages/flexkv/tests/test_index.py (1 tests)",
    ]


@pytest.fixture
def checkout(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose record names its first commit."""
    git(tree, "init", "-q", "-b", "main")
    base = commit(tree)
    monkeypatch.setattr(Record, "committed", lambda: Record(base))
    monkeypatch.setattr(Rules, "read", lambda: RULES)
    return tree


def git(folder: Path, *command: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *author, *command], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().strip()


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "a change")
    return git(folder, "rev-parse", "HEAD")


def test_a_change_is_all_since_the_commit_that_ran_whole(checkout: Path) -> None:
    assert Lane.of_landing(checkout).leaves_out(INDEX)
    checkout.joinpath(f"{CORE}/cli.py").write_text("")
    commit(checkout)
    checkout.joinpath("integration/tests/test_others.py").write_text("# changed")
    lane = Lane.of_landing(checkout)
    assert [test for test in TESTS if not lane.leaves_out(test)] == [OTHERS, DOCS, INDEX]


def test_a_file_that_is_gone_or_renamed_is_a_change(checkout: Path) -> None:
    checkout.joinpath("conftest.py").touch()
    base = commit(checkout)
    Record.committed = lambda: Record(base)  # type: ignore[method-assign]
    git(checkout, "mv", "conftest.py", "README.md")
    commit(checkout)
    assert Lane.of_landing(checkout).whole


@pytest.mark.parametrize("named", ["", "0" * 40, "main~", "a branch"])
def test_all_tests_run_if_the_commit_is_not_there(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(Record, "committed", lambda: Record(named))
    lane = Lane.of_landing(checkout)
    assert repr(named) in lane.whole
    assert not any(map(lane.leaves_out, TESTS))


def test_all_tests_run_beside_a_commit_that_the_work_does_not_build_on(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(checkout, "checkout", "-q", "-b", "other")
    other = commit(checkout)
    git(checkout, "checkout", "-q", "main")
    monkeypatch.setattr(Record, "committed", lambda: Record(other))
    assert other in Lane.of_landing(checkout).whole


def test_all_tests_run_where_git_is_not(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "committed", lambda: Record("0" * 40))
    assert Lane.of_landing(tree).whole


def test_the_limit_is_twice_what_the_record_expects() -> None:
    hour = FileTimes(3600.0, 1.0, 10, 0.0)
    record = Record(workers=2, files={"packages/flexkv/tests/test_index.py": hour, "b.py": hour})
    setup = landing.SETUP_SECONDS / 60
    assert Lane("all").minutes(record) == (setup + 60, landing.MOST_MINUTES)
    lane = Lane(files=frozenset({"b.py"}))
    assert lane.minutes(record) == (setup + 30, 2 * (setup + 30))
    assert lane.minutes(Record())[1] == landing.MOST_MINUTES
    none = Lane(files=frozenset(record.files))
    assert none.minutes(record) == (setup, max(landing.LEAST_MINUTES, 2 * setup))


# The rules of this project ------------------------------------------------------------------------


@functools.cache
def rules() -> Rules:
    return Rules.read()


@functools.cache
def importers() -> Importers:
    return Importers(ROOT)


def committed_files() -> list[str]:
    if not ROOT.joinpath(".git").exists():
        pytest.skip("a copy without git, as of a mutant, cannot tell its files from others")
    return git(ROOT, "ls-files").splitlines()


def test_every_pattern_of_the_rules_fits_a_file() -> None:
    files = committed_files()
    patterns = [*rules().whole, *rules().harmless]
    for room in rules().rooms:
        patterns += [*room.tests, *room.changed, *room.importers]
    assert [p for p in patterns if not any(landing._fits(file, [p]) for file in files)] == []


def test_a_nightly_test_exists_and_so_does_what_finds_its_faults() -> None:
    names, tests = {mutant.name for mutant in entries.load()}, [*files_of_tests()]
    for each in rules().nightly:
        assert any(landing._fits(file, [each.tests.partition("::")[0]]) for file in tests), each
        assert each.found_by, each
        for found in each.found_by:
            file, _, function = found.partition("::")
            assert found in names or f"def {function}" in ROOT.joinpath(file).read_text(), found


def test_a_nightly_pattern_fits_a_test(request: pytest.FixtureRequest) -> None:
    """Of the tests that this run has collected."""
    assert request.config.stash[UNFIT] == []


def test_a_pattern_that_fits_no_test_is_found() -> None:
    assert RULES.unfit(TESTS) == []
    assert RULES.unfit([DOCS]) == [], "none was collected from its file"
    assert RULES.unfit(KINDS[1:]) == ["*::test_kind[a b]"]
    other = "integration/tests/test_kinds.py::test_other"
    wrong = Nightly("integration/tests/test_kinds.py::test_gone*", ("*",), ())
    assert Rules((), (), (), (wrong,)).unfit([other]) == [wrong.tests, "*"]


def test_only_tests_with_an_engine_are_left_to_the_night() -> None:
    folders = ("integration/tests/", "integration/demo/tests/", "integration/gpu/tests/")
    assert [each for each in rules().nightly if not each.tests.startswith(folders)] == []


def test_a_mutant_dies_before_a_change_of_its_file_lands() -> None:
    """All tests that notice it run in the landing of a change to its file."""
    mutants = entries.load()
    lanes = {
        file: Lane.of([file], rules(), importers()) for file in {mutant.file for mutant in mutants}
    }
    assert [m.name for m in mutants if any(map(lanes[m.file].leaves_out, m.tests))] == []


@pytest.mark.parametrize("folder", ["tiers/disk", "index", "eviction", "host", "layout"])
def test_a_change_in_a_room_of_the_core_runs_no_more_than_a_part(folder: str) -> None:
    lane = Lane.of([f"{CORE}/{folder}/__init__.py"], rules(), importers())
    assert not lane.whole
    tests = {file for file in files_of_tests() if file not in lane.files}
    assert "integration/tests/test_equality_warm.py" in tests
    assert ("integration/tests/test_sglang_linker.py" in tests) == folder.startswith("tiers")


def test_a_change_of_a_room_is_none_of_the_tests_of_another_engine() -> None:
    lane = Lane.of(["packages/flexkv-sglang/src/flexkv_sglang/linker.py"], rules(), importers())
    assert "integration/tests/test_equality_warm.py" in lane.files
    assert "integration/tests/test_sglang_linker.py" not in lane.files
    assert "packages/flexkv-vllm/tests/test_world.py" in lane.files


def test_the_rules_know_all_files_of_the_project() -> None:
    """A file that no rule knows would run all tests whenever it changes."""
    unknown = [f for f in committed_files() if "no rule" in landing._concerns_all(f, rules())]
    assert unknown == []
