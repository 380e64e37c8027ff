# SPDX-License-Identifier: Apache-2.0
"""Which tests with engines run together, in which order, and what an interrupted run says."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.tests import sharing

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
FIXTURES = """
import pytest

class Engine: pass

@pytest.fixture(scope="session")
def host(): pass

@pytest.fixture(scope="session")
def reference(host): pass

@pytest.fixture
def engine(host, reference) -> "Engine":
    return Engine()
"""
ANSWERS = """
def test_answer(engine): pass
def test_own_start(host): pass
def test_own_start_and_reference(host, reference): pass
"""
MODES = """
import pytest

@pytest.fixture(scope="module", params=["a", "b"])
def mode(request): return request.param

@pytest.fixture
def engine(mode, host) -> "Engine":
    return mode

def test_one(engine): pass
def test_two(engine): pass
"""
PROOFS = """
import pytest
pytestmark = pytest.mark.proof
def test_proof(engine): pass
"""
UNITS = """
import pytest

@pytest.mark.alone
def test_alone(): pass
def test_unit(): pass
"""
SERVED = """
import pytest

@pytest.fixture(scope="module")
def server(host): pass

def test_first(server): pass
def test_second(server): pass
"""


@pytest.fixture
def groups(pytester: pytest.Pytester) -> list[tuple[str | None, list[str]]]:
    """Groups and their tests, in the order in which they run; None: a test on its own."""
    pytester.makeconftest(FIXTURES)
    pytester.makeini(
        "[pytest]\nmarkers =\n    proof: comes first\n    xdist_group(name): runs on\n"
    )
    pytester.makepyfile(
        test_answers=ANSWERS, test_modes=MODES, test_proofs=PROOFS, test_served=SERVED
    )
    items, _ = pytester.inline_genitems()
    found: list[tuple[str | None, list[str]]] = []
    for item in sharing.grouped(items):
        mark = item.get_closest_marker("xdist_group")
        group = None if mark is None else str(mark.args[0])
        if group is None or not found or found[-1][0] != group:
            found.append((group, []))
        found[-1][1].append(item.name)
    return found


def test_tests_of_one_engine_run_together_behind_the_proof(
    groups: list[tuple[str | None, list[str]]],
) -> None:
    group, tests = groups[0]
    assert group is not None
    assert group.endswith(":engine")
    assert tests == ["test_proof", "test_answer"]


def test_another_parameter_is_another_engine(groups: list[tuple[str | None, list[str]]]) -> None:
    for index, mode in enumerate("ab"):
        group = (f"test_modes.py:engine mode={index}", [f"test_one[{mode}]", f"test_two[{mode}]"])
        assert group in groups


def test_what_a_module_shares_is_a_group(groups: list[tuple[str | None, list[str]]]) -> None:
    assert ("test_served.py:server", ["test_first", "test_second"]) in groups


def test_what_needs_no_reference_runs_while_the_proof_does(
    groups: list[tuple[str | None, list[str]]],
) -> None:
    assert (None, ["test_own_start"]) in groups
    assert groups[-1] == (None, ["test_own_start_and_reference"])


def test_two_at_a_time_the_short_tests_are_last(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    alone: x\n    proof: x\n    xdist_group(name): x\n")
    pytester.makepyfile(
        test_engine="def test_engine(): pass",
        test_units=UNITS,
    )
    items, _ = pytester.inline_genitems()
    engines, others = items[:1], items[1:]
    one = [item.name for item in sharing.in_turn(engines, others, two_at_a_time=False)]
    assert one == ["test_alone", "test_unit", "test_engine"]
    two = [item.name for item in sharing.in_turn(engines, others, two_at_a_time=True)]
    assert two == ["test_engine", "test_unit", "test_alone"]


def test_unit_tests_share_what_a_fixture_of_their_module_makes(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    xdist_group(name): x\n    alone: x\n")
    pytester.makeconftest(FIXTURES)
    pytester.makepyfile(test_served=SERVED, test_units="def test_unit(): pass")
    items, _ = pytester.inline_genitems()
    groups = {
        item.name: [mark.args[0] for mark in item.iter_markers("xdist_group")]
        for item in sharing.in_turn([], items, two_at_a_time=True)
    }
    shared = ["test_served.py:server"]
    assert groups == {"test_first": shared, "test_second": shared, "test_unit": []}


def test_a_group_stays_on_its_worker(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    alternate = "import os, pytest\n" + "".join(
        f"@pytest.mark.xdist_group('{number % 2}')\n"
        f"def test_{number}(): open('{number}', 'w').write(os.environ['PYTEST_XDIST_WORKER'])\n"
        for number in range(8)
    )
    pytester.makepyfile(alternate)
    pytester.runpytest_subprocess("-n", "2", "--dist", "loadgroup").assert_outcomes(passed=8)
    workers = [(pytester.path / str(number)).read_text() for number in range(8)]
    assert workers[0] != workers[1]
    assert workers == workers[:2] * 4


def test_an_interrupted_run_names_what_was_under_way(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile("def test_ends(): pass\ndef test_hangs(): raise KeyboardInterrupt")
    result = pytester.runpytest_inprocess(no_reraise_ctrlc=True)
    result.stdout.fnmatch_lines(["*under way when interrupted*", "*::test_hangs", "*1 passed*"])
    result.stdout.no_fnmatch_line("*::test_ends")
