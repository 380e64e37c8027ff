# SPDX-License-Identifier: Apache-2.0
"""The report, on made-up results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from integration.bench.rows import Goal, Row, table
from integration.gpu import goals, machine
from integration.gpu.report import markdown, write_report
from integration.gpu.results import Outcome
from integration.gpu.timing import interleaved, median_row, rates, ratio_of_rates

MACHINE = {"device": "NVIDIA H200", "driver": "580.1", "command": "python | -m <x>"}
OURS, LARGE = ("FlexKV", [54.0, 55.0, 56.0]), ("one large copy", [50.0, 57.0, 100.0])


def outcomes() -> list[Outcome]:
    rows = [
        ratio_of_rates("load, 16 KiB pages", Goal(">=", 0.95), OURS, LARGE),
        ratio_of_rates("load, 4 KiB pages", Goal(">=", 0.99), OURS, LARGE),
        median_row("both ways", None, [80.0, 90.0, 85.5], "GB/s", "for | comparison"),
    ]
    return [Outcome("One way", rows, ["a note"]), Outcome("Tests", failure="boom\n```\nlast line")]


def test_the_page_names_device_figures_goals_and_failures() -> None:
    text = markdown(MACHINE, outcomes(), partial=False, json_name="x.json")
    assert text.startswith("# Measured on NVIDIA H200\n")
    assert "1 of 2 rows with a goal reach it. Sections that failed: Tests." in text
    assert (
        "| load, 16 KiB pages | 0.965 | >= 0.95 | ok | 55.00 GB/s ÷ 57.00 GB/s, medians of 3 |"
        in text
    )
    assert "| load, 4 KiB pages | 0.965 | >= 0.99 | **missed** |" in text
    assert "| both ways | 85.5 GB/s |  |  | for \\| comparison, median of 3 |" in text
    assert "| command | python \\| -m &lt;x> |" in text
    assert "boom\n'''\nlast line\n```" in text
    assert "- a note" in text
    assert "partial" not in text
    assert "**A partial run**" in markdown(MACHINE, outcomes(), partial=True, json_name="x.json")


def test_the_report_is_written_with_all_samples(tmp_path: Path) -> None:
    path = tmp_path / "measured" / "nvidia-h200.md"
    write_report(path, MACHINE, outcomes(), partial=False)
    assert "(nvidia-h200.json)" in path.read_text()
    document = json.loads(path.with_suffix(".json").read_text())
    assert document["machine"] == MACHINE
    assert document["passed"] is False
    first = document["sections"][0]["rows"][0]
    assert first["samples"] == {"FlexKV": OURS[1], "one large copy": LARGE[1]}
    assert (first["goal"], first["passed"]) == (">= 0.95", True)


def test_what_was_not_measured_has_no_value(tmp_path: Path) -> None:
    row = Row("errors", math.nan, "errors", Goal("<=", 0), "did not end")
    write_report(tmp_path / "a.md", MACHINE, [Outcome("Tests", [row])], partial=False)
    assert "| errors | not measured | &lt;= 0 | **missed** |" in (tmp_path / "a.md").read_text()
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["sections"][0]["rows"][0]["value"] is None


def test_the_goals_are_listed_with_the_row_furthest_from_them() -> None:
    rows = [
        Row("load, 16 KiB", 0.99, "ratio", goals.ONE_WAY_LONG, ""),
        Row("store, 64 KiB", 0.96, "ratio", goals.ONE_WAY_LONG, ""),
        Row("product, 4 KiB", 1.01, "ratio", goals.COMPUTE_BESIDE, ""),
        Row("product, 16 KiB", 1.015, "ratio", goals.COMPUTE_BESIDE, ""),
        Row("order, load", math.nan, "us", goals.SUBMIT, ""),
        Row("order, store", 40.0, "us", goals.SUBMIT, ""),
    ]
    found = {verdict.goal: verdict for verdict in goals.verdicts(rows)}
    assert tuple(found) == goals.GOALS
    assert [found[goal].text for goal in (goals.ONE_WAY_LONG, goals.COMPUTE_BESIDE)] == [
        "missed",
        "met",
    ]
    worst = found[goals.ONE_WAY_LONG].worst, found[goals.COMPUTE_BESIDE].worst
    assert [row.what for row in worst if row] == ["store, 64 KiB", "product, 16 KiB"]
    assert found[goals.SUBMIT].text == "missed"
    assert found[goals.BOTH_WAYS].text == "not measured"
    text = markdown(MACHINE, [Outcome("One way", rows)], partial=False, json_name="x.json")
    name = goals.ONE_WAY_LONG.name
    assert f"| {name} | >= 0.97 | 0.960 | **missed** | store, 64 KiB |" in text
    assert f"| {goals.BOTH_WAYS.name} | >= 0.97 |  | not measured |  |" in text


def test_a_value_that_does_not_count_reaches_no_goal() -> None:
    crawling = Row("b", 1.0, "ratio", goals.COMPUTE_BESIDE, "3 GB/s", void="copies crawl")
    slow = Row("a", 1.5, "ratio", goals.COMPUTE_BESIDE, "")
    assert not crawling.passed
    found = {verdict.goal: verdict for verdict in goals.verdicts([slow, crawling])}
    assert found[goals.COMPUTE_BESIDE].worst == crawling
    assert found[goals.COMPUTE_BESIDE].text == "missed"
    text = markdown(MACHINE, [Outcome("Beside", [crawling])], partial=False, json_name="x.json")
    assert "| b | 1.000 | &lt;= 1.02 | **missed** | 3 GB/s; does not count: copies crawl |" in text
    assert "3 GB/s; does not count: copies crawl" in table([crawling])


def test_every_goal_has_a_name_of_its_own() -> None:
    names = [goal.name for goal in goals.GOALS]
    assert "" not in names
    assert len(set(names)) == len(names)


def test_copies_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    copies = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = interleaved(copies, repeats=3)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert rates([0.5, 2.0], 1_000_000_000) == [2.0, 0.5]


def test_devices_have_names_that_files_can_have() -> None:
    assert machine.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert machine.slug("../..") == "device"


def test_the_answer_of_nvidia_smi_is_read() -> None:
    answer = "580.65.06, 143771 MiB, 5, 16, 700.00 W, 1980 MHz\n"
    assert machine.parse_query(answer) == {
        "driver": "580.65.06",
        "memory": "143771 MiB",
        "link generation, most": "5",
        "link width, most": "16",
        "power limit": "700.00 W",
        "SM clock, most": "1980 MHz",
    }
    assert machine.parse_query("") == {}
    assert machine.host()["processor"]
