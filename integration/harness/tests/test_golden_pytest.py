# SPDX-License-Identifier: Apache-2.0
"""What pytest does with stored answers: second runs, reports, checks and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.harness.golden import Ledger, Mode, StandIn

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
BOOK = "engine-1"

CONFTEST = """
import os
from pathlib import Path

import pytest

from integration.harness.golden import Ledger, Mode, StandIn
from integration.harness.golden_pytest import MARKER, GoldenPlugin

LEDGER = Ledger(Path("golden").resolve(), Mode(os.environ.get("MODE", "stored")))
REAL = os.environ.get("REAL", "right")

def pytest_configure(config):
    config.addinivalue_line("markers", MARKER)
    config.addinivalue_line("markers", "engine")
    config.pluginmanager.register(GoldenPlugin(LEDGER, Path(__file__).parent), "golden")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker("engine")

@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    note("timers", "x")

def note(name, text):
    with open(name, "a") as file:
        file.write(text)

class Plain(StandIn):
    def __init__(self):
        super().__init__("engine-1", {}, remembers=False, ledger=LEDGER)

    def ask(self, prompt):
        def answer():
            note("asked", prompt)
            return f"{REAL} {prompt}"
        return self.call(prompt, answer)

@pytest.fixture(scope="session")
def reference():
    return Plain().ask("a")

@pytest.fixture(scope="module")
def flexkv():
    return f"{REAL} a"
"""
IMPORT = "from conftest import Plain, note\n"
EQUAL = IMPORT + "def test_equal(reference, flexkv): assert flexkv == reference\n"
EQUAL_AGAIN = "def test_equal_again(reference, flexkv): assert flexkv == reference\n"
BROKEN = IMPORT + "def test_broken(reference): assert reference == 'wrong a'\n"
UNSTABLE = (
    IMPORT
    + """
from pathlib import Path

def test_unstable(reference):
    first = not Path("ran").exists()
    Path("ran").touch()
    assert not first
"""
)
IN_SETUP = (
    IMPORT
    + """
import pytest

@pytest.fixture(scope="module")
def equal(reference, flexkv): assert flexkv == reference

def test_equal(equal): pass
"""
)
WORKERS = ("-n", "2", "-p", "xdist")


Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs tests beside stored answers, which are "right a" and "right b"."""
    pytester.makeconftest(CONFTEST)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{pytester.path}")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    first = Ledger(pytester.path / "golden", Mode.WRITE)
    asker = StandIn(BOOK, {}, ledger=first, remembers=False)
    for prompt, answer in {"a": "right a", "b": "right b"}.items():
        asker.call(prompt, answer.__str__)
    first.write(first.asked, complete=True)

    def made(text: str, *options: str, real: str = "right", mode: str = "") -> pytest.RunResult:
        monkeypatch.setenv("REAL", real)
        monkeypatch.setenv("MODE", mode or "stored")
        pytester.makepyfile(test_it=text)
        return pytester.runpytest("-p", "no:cacheprovider", *options)

    return made


def asked(pytester: pytest.Pytester) -> str:
    """The prompts that real engines answered."""
    path = pytester.path / "asked"
    return path.read_text() if path.exists() else ""


both = pytest.mark.parametrize("options", [(), WORKERS], ids=["one process", "two workers"])


def test_tests_that_pass_start_no_engine(run: Run, pytester: pytest.Pytester) -> None:
    result = run(EQUAL + EQUAL_AGAIN)
    result.assert_outcomes(passed=2)
    assert asked(pytester) == ""
    result.stdout.no_fnmatch_line("*golden answers*")


@both
def test_another_processor_passes_and_is_reported(
    run: Run, pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    result = run(EQUAL, *options, real="other")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*= golden answers =*", "*test_equal*passed*engine-1 *"])
    assert asked(pytester) == "a"


def test_a_fixture_that_fails_on_another_processor_runs_again(
    run: Run, pytester: pytest.Pytester
) -> None:
    run(IN_SETUP, real="other").assert_outcomes(passed=1)


def test_a_failure_on_another_processor_is_a_failure(run: Run, pytester: pytest.Pytester) -> None:
    result = run(BROKEN, real="other")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 'other a' == 'wrong a'*", "*ran again and failed*"])


def test_a_failure_beside_right_answers_is_a_failure(run: Run, pytester: pytest.Pytester) -> None:
    result = run(BROKEN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_broken*ran again and failed*no stored answer differs"])


@both
def test_an_unstable_test_fails_though_it_passes_the_second_time(
    run: Run, pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    result = run(UNSTABLE, *options)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_unstable*passed*no stored answer differs"])
    assert asked(pytester) == "a"


@pytest.mark.parametrize(("real", "outcomes"), [("right", {"passed": 1}), ("other", {"failed": 1})])
def test_a_check_fails_where_an_answer_differs(
    run: Run, pytester: pytest.Pytester, real: str, outcomes: dict[str, int]
) -> None:
    result = run(EQUAL, real=real, mode="check")
    result.assert_outcomes(**outcomes)
    assert asked(pytester) == "a"


@both
def test_a_check_fails_where_an_answer_is_missing(
    run: Run, pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    text = IMPORT + "def test_new(): assert Plain().ask('c') == 'right c'\n"
    result = run(text, *options, mode="check")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_new not stored: engine-1 *"])


@both
def test_a_complete_run_writes_what_it_asked(
    run: Run, pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    text = EQUAL + "def test_new(): assert Plain().ask('c') == 'right c'\n"
    run(text, *options, mode="write").assert_outcomes(passed=2)
    found = json.loads((pytester.path / "golden" / f"{BOOK}.json").read_text())
    assert sorted(found.values()) == ["right a", "right c"]


NEW = EQUAL + "def test_new(): assert Plain().ask('c') == 'right c'\n"
SKIPPED = "import pytest\n@pytest.mark.skip\ndef test_skipped(): pass\n"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param(NEW, ("-k", "new"), id="deselected"),
        pytest.param(NEW, ("-k", "new", *WORKERS), id="deselected by workers"),
        pytest.param(NEW, ("test_it.py",), id="another path"),
        pytest.param(NEW + "def test_broken(): assert False\n", (), id="failed"),
        pytest.param(NEW + SKIPPED, (), id="skipped"),
        pytest.param(NEW, ("--continue-on-collection-errors",), id="not collected"),
    ],
)
def test_a_partial_run_keeps_other_answers(
    run: Run, pytester: pytest.Pytester, text: str, options: tuple[str, ...]
) -> None:
    if "--continue-on-collection-errors" in options:
        pytester.makepyfile(test_other="raise ValueError")
    run(text, *options, mode="write")
    found = json.loads((pytester.path / "golden" / f"{BOOK}.json").read_text())
    assert sorted(found.values()) == ["right a", "right b", "right c"]


def test_later_tests_use_stored_answers_after_an_unstable_one(
    run: Run, pytester: pytest.Pytester
) -> None:
    run(UNSTABLE + EQUAL_AGAIN).assert_outcomes(failed=1, passed=1)
    assert asked(pytester) == "a"


def test_later_tests_use_no_stored_answer_on_another_processor(
    run: Run, pytester: pytest.Pytester
) -> None:
    run(EQUAL + EQUAL_AGAIN, real="other").assert_outcomes(passed=2)
    assert asked(pytester) == "aa"


def test_a_test_fails_once_where_no_stored_answer_was_used(
    run: Run, pytester: pytest.Pytester
) -> None:
    text = IMPORT + "def test_broken(): note('ran', 'x'); assert False\n"
    run(text).assert_outcomes(failed=1)
    assert (pytester.path / "ran").read_text() == "x"


def test_no_later_test_runs_again_that_uses_no_stored_answer(
    run: Run, pytester: pytest.Pytester
) -> None:
    """The second run of the first test has ended the fixtures that held stored answers."""
    run(UNSTABLE + "def test_broken(): note('runs', 'x'); assert False\n").assert_outcomes(failed=2)
    assert (pytester.path / "runs").read_text() == "x"


def test_answers_that_are_not_stored_are_reported(run: Run) -> None:
    result = run(IMPORT + "def test_new(): assert Plain().ask('c') == 'right c'\n")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_new not stored, asked of a plain engine: engine-1 *"])


def test_an_error_between_both_runs_is_reported(run: Run) -> None:
    text = """
import pytest

@pytest.fixture(scope="session")
def engine(reference):
    yield
    if reference == "right a": raise RuntimeError("does not end")

"""
    result = run(
        IMPORT + text + "def test_equal(engine, reference): assert reference == 'other a'"
        "\ndef test_more(engine): pass\n",
        real="other",
    )
    result.assert_outcomes(passed=2, errors=1)


def test_a_second_run_has_as_much_time_as_the_first(run: Run, pytester: pytest.Pytester) -> None:
    run(BROKEN, "--timeout", "600").assert_outcomes(failed=1)
    assert (pytester.path / "timers").read_text() == "xx"
    (pytester.path / "timers").unlink()
    run(EQUAL, "--timeout", "600").assert_outcomes(passed=1)
    assert (pytester.path / "timers").read_text() == "x"


def test_tests_that_ask_a_plain_engine_can_be_selected(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_other="def test_other(reference): pass\n")
    run(EQUAL, "-m", "golden").assert_outcomes(passed=1, deselected=1)
