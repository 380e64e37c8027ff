# SPDX-License-Identifier: Apache-2.0
"""What becomes of two finished runs: verdict, table, chart, and the options about them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from integration.demo import chart, options, screen
from integration.demo.conversation import Turn
from integration.demo.engines import root_cause
from integration.demo.options import OptionError
from integration.demo.verdict import Pair, Results, Spread, judge
from integration.harness.answers import EngineStartError

FACTS = {"engine": "vLLM", "model": "a model", "talk": "two users"}


def turn(number: int, user: str, ttft: float, tokens: list[int], cached: int = 0) -> Turn:
    return Turn(number, user, 1_000, cached, ttft, ttft + 1, tokens)


def pairs() -> list[Pair]:
    """Two users, two turns each; the second turn comes ten times sooner with FlexKV."""
    return [
        Pair(turn(1, "Ada", 2.0, [1, 2]), turn(1, "Ada", 2.0, [1, 2])),
        Pair(turn(1, "Ben", 2.0, [3, 4]), turn(1, "Ben", 2.0, [3, 4])),
        Pair(turn(2, "Ada", 3.0, [5, 6]), turn(2, "Ada", 0.3, [5, 6], 900)),
        Pair(turn(2, "Ben", 3.0, [7, 8]), turn(2, "Ben", 0.3, [7, 8], 900)),
    ]


def plain(loaded: int = 1_800) -> Results:
    """Nothing but the two runs."""
    return Results(pairs(), loaded)


def restarts() -> list[Pair]:
    last = pairs()[2:]
    return [
        Pair(last[0].without, turn(2, "Ada", 0.5, [5, 6], 900)),
        Pair(last[1].without, turn(2, "Ben", 0.7, [7, 8], 900)),
    ]


def whole() -> Results:
    """All four runs."""
    example = [turn(number, user, 2.5, [9]) for number in (1, 2) for user in ("Ada", "Ben")]
    return replace(plain(), restarts=restarts(), restored_tokens=1_500, example=example)


def with_another_answer() -> Results:
    *rest, last = pairs()
    return Results([*rest, Pair(last.without, turn(2, "Ben", 0.3, [7, 9], 900))], 1_800)


def with_another_answer_after_the_restart() -> Results:
    first, last = restarts()
    other = Pair(first.without, turn(2, "Ada", 0.5, [5, 5], 900))
    return replace(whole(), restarts=[other, last])


def test_medians_are_taken_over_first_and_returning_turns_apart() -> None:
    verdict = judge(plain())
    assert verdict.passed
    assert verdict.first_without == verdict.first_with == Spread(2.0, 2.0, 2.0)
    assert verdict.returning_without == Spread(3.0, 3.0, 3.0)
    assert verdict.returning_with == Spread(0.3, 0.3, 0.3)
    assert verdict.speedup == pytest.approx(10)
    assert verdict.compared_tokens == 8
    assert verdict.restarted_with is None
    assert verdict.returning_example is None


def test_turns_after_the_restart_are_compared_with_the_same_prompts() -> None:
    verdict = judge(whole())
    assert verdict.passed
    assert verdict.restarted_without == Spread(3.0, 3.0, 3.0)
    assert verdict.restarted_with == Spread(0.6, 0.5, 0.7)
    assert verdict.compared_tokens == 12
    assert verdict.returning_example == Spread(2.5, 2.5, 2.5)


def test_one_other_token_fails_the_demo_and_is_named() -> None:
    verdict = judge(with_another_answer())
    assert not verdict.passed
    assert verdict.different == ["turn 2 of Ben"]
    verdict = judge(with_another_answer_after_the_restart())
    assert not verdict.passed
    assert verdict.different == ["Ada after the restart"]


@pytest.mark.parametrize(("others", "fair"), [(0.02, True), (0.4, False)])
def test_a_busy_machine_makes_the_times_unfair(others: float, fair: bool) -> None:
    first, *rest = restarts()
    busy = [Pair(first.without, replace(first.with_flexkv, others=others)), *rest]
    finished = replace(whole(), restarts=busy)
    verdict = judge(finished)
    assert verdict.others["without FlexKV"] == 0
    assert 0 < verdict.others["after the restart"] < others
    assert (verdict.is_fair, verdict.passed) == (fair, True)
    text = " ".join(shown(finished, terminal=False).split())
    assert ("These times are not fair" in text) != fair
    assert f"{100 * verdict.others['after the restart']:.0f} % after the restart" in text


def test_a_demo_without_loads_fails() -> None:
    assert not judge(plain(loaded=0)).passed


def test_a_restart_that_finds_nothing_fails_the_demo() -> None:
    assert not judge(replace(whole(), restored_tokens=0)).passed


def shown(finished: Results, *, terminal: bool, random: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False)
    runs = [screen.WITHOUT, screen.WITH]
    runs += [screen.EXAMPLE] * bool(finished.example) + [screen.RESTARTED] * bool(finished.restarts)
    with screen.Screen(console, ["Ada", "Ben"], 2, runs) as display:
        display.say("starting vLLM")
        for pair in finished.pairs:
            display.add(screen.WITHOUT, pair.without)
        for pair in finished.pairs:
            display.add(screen.WITH, pair.with_flexkv)
        for example in finished.example:
            display.add(screen.EXAMPLE, example)
        for pair in finished.restarts:
            display.add(screen.RESTARTED, pair.with_flexkv)
    console.print(display.table())
    screen.show_verdict(console, judge(finished), random=random)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_screen_shows_times_and_equality(terminal: bool) -> None:
    text = shown(plain(), terminal=terminal)
    assert "10.0x" in text
    assert "0.30 s" in text
    assert "All 4 answers are identical" in text
    assert "gibberish" in text
    assert "DIFFERENT" not in text


def test_the_screen_shows_a_difference_and_what_it_may_be() -> None:
    text = shown(with_another_answer(), terminal=False, random=False)
    assert "DIFFERENT" in text
    assert "Answers differ: turn 2 of Ben" in text
    assert "--dtype float32" in text
    assert "identical, token by token" not in text


def test_the_screen_says_when_flexkv_had_no_part() -> None:
    assert "FlexKV brought nothing back" in shown(plain(loaded=0), terminal=False)


def test_the_screen_shows_the_restart_and_the_example_connector() -> None:
    text = " ".join(shown(whole(), terminal=False).split())
    assert "kill -9, 2" in text
    assert "0.60 s (0.50 to 0.70) instead of 3.00 s (3.00 to 3.00); 1,500 tokens" in text
    assert "All 6 answers are identical" in text
    assert "ExampleConnector" in text
    assert "2.50 s" in text
    assert "nothing on disk" in shown(replace(whole(), restored_tokens=0), terminal=False)


@pytest.mark.parametrize(
    ("name", "magic"), [("d.png", b"\x89PNG"), ("d.pdf", b"%PDF"), ("d.svg", b"<?xml")]
)
def test_the_chart_is_an_image(tmp_path: Path, name: str, magic: bytes) -> None:
    path = tmp_path / name
    chart.draw(whole(), judge(whole()), FACTS, path)
    assert path.read_bytes().startswith(magic)


def chart_text(path: Path, finished: Results) -> str:
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        chart.draw(finished, judge(finished), FACTS, path)
    return path.read_text(encoding="utf-8")


def test_the_chart_claims_only_what_was_found(tmp_path: Path) -> None:
    claim = "10 times sooner, and the same answer"
    assert claim in chart_text(tmp_path / "good.svg", plain())
    assert claim not in chart_text(tmp_path / "bad.svg", with_another_answer())
    restart, example = "started again", "ExampleConnector"
    assert restart in chart_text(tmp_path / "whole.svg", whole())
    assert example in chart_text(tmp_path / "whole.svg", whole())
    assert restart not in chart_text(tmp_path / "plain.svg", plain())
    assert example not in chart_text(tmp_path / "plain.svg", plain())


@pytest.mark.parametrize(
    "arguments",
    [["--users", "1"], ["--turns", "1"], ["--kv-conversations", "0.5"], ["--cpu-cache-gb", "x"]],
)
def test_options_out_of_range_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse(arguments)
    assert caught.value.code != 0
    message = capsys.readouterr().err
    assert arguments[0] in message
    assert f"{arguments[1]!r} is not allowed; allowed:" in message


@pytest.mark.parametrize("out", ["missing/demo.png", "demo.xyz", "."])
def test_a_chart_that_could_not_be_written_is_refused_at_once(tmp_path: Path, out: str) -> None:
    asked = options.parse(["--out", str(tmp_path / out), "--json", str(tmp_path / "demo.json")])
    with pytest.raises(OptionError, match="--out"):
        asked.check_outputs()


def test_why_an_engine_did_not_start_is_found_in_its_log() -> None:
    log = (
        "(EngineCore pid=1) INFO starting\n"
        "(Worker pid=2) ERROR [worker.py:1] flexkv.types.errors.ArenaError: cpu_cache_gb is 900\n"
        "(EngineCore pid=1) Exception: WorkerProc initialization failed\n"
    )
    cause = root_cause(EngineStartError("the engine did not start", log, []))
    assert cause == "flexkv.types.errors.ArenaError: cpu_cache_gb is 900"
    assert root_cause(EngineStartError("not ready within 9 s", "", [])) == "not ready within 9 s"
