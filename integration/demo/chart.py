# SPDX-License-Identifier: Apache-2.0
"""The demo's chart: time to first token turn by turn, with and without FlexKV, and after a kill.

A bar is the median over the users, its line reaches from the fastest to the slowest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.demo.conversation import Turn
from integration.demo.verdict import Results, Verdict, spread

WITHOUT_COLOR = "#9aa3b2"
EXAMPLE_COLOR = "#d9a441"
WITH_COLOR = "#0b7a6f"
INK = "#1f2937"
GROUP_WIDTH = 0.8  # of the distance between two groups
LEFT = 0.06  # of the figure's width, where axes and titles begin


def draw(results: Results, verdict: Verdict, facts: Mapping[str, str], path: Path) -> None:
    """Write the chart to `path`; its suffix names the format (png, svg, pdf).

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=150, facecolor="white")
    figure.subplots_adjust(left=LEFT, right=0.985, top=0.81, bottom=0.13)
    axes: Any = figure.subplots()
    _bars(axes, results, facts["engine"].split()[0])
    _axes(axes, results)
    figure.suptitle(_title(verdict), x=LEFT, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes.set_title(
        f"{facts['engine']} · {facts['model']}{_load(verdict)}\n{facts['talk']}",
        loc="left",
        fontsize=9,
        color=INK,
        pad=22,
    )
    axes.legend(frameon=False, loc="lower right", ncols=3, bbox_to_anchor=(1, 1.0), fontsize=9)
    figure.savefig(path)


def _numbers(results: Results) -> list[int]:
    return sorted({pair.without.number for pair in results.pairs})


def _series(results: Results, engine: str) -> list[tuple[str, str, list[list[Turn]]]]:
    """Name, colour and turns by group of each set of bars; a group without bars is empty."""
    pairs, restarts = results.pairs, results.restarts
    numbers = _numbers(results)

    def by_number(turns: Sequence[Turn]) -> list[list[Turn]]:
        return [[turn for turn in turns if turn.number == number] for number in numbers]

    series = [
        (
            engine,
            WITHOUT_COLOR,
            [*by_number([p.without for p in pairs]), [p.without for p in restarts]],
        ),
        (
            f"{engine} + FlexKV",
            WITH_COLOR,
            [*by_number([p.with_flexkv for p in pairs]), [p.with_flexkv for p in restarts]],
        ),
    ]
    if results.example:
        example = ("vLLM + its ExampleConnector", EXAMPLE_COLOR, [*by_number(results.example), []])
        series.insert(1, example)
    return series


def _bars(axes: Any, results: Results, engine: str) -> None:
    series = _series(results, engine)
    width = GROUP_WIDTH / len(series)
    for index, (name, color, groups) in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * width
        found = [(place + shift, spread(turns)) for place, turns in enumerate(groups) if turns]
        places, spreads = [place for place, _ in found], [each for _, each in found]
        below = [each.middle - each.least for each in spreads]
        above = [each.most - each.middle for each in spreads]
        axes.bar(
            places,
            [each.middle for each in spreads],
            width * 0.94,
            yerr=(below, above),
            capsize=3,
            ecolor=INK,
            error_kw={"elinewidth": 0.9},
            color=color,
            label=name,
        )
        for place, each in found:
            axes.annotate(
                f"{each.middle:.2f}",
                (place, each.most),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=INK,
            )


def _axes(axes: Any, results: Results) -> None:
    labels = [
        f"turn {number}" + ("\n(nothing to reuse yet)" if number == 1 else "")
        for number in _numbers(results)
    ]
    if results.restarts:
        labels.append("kill -9, started again:\nthe last turn once more")
    axes.set_xticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylabel("seconds to the first token", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _load(verdict: Verdict) -> str:
    """The machine's load, if it makes the times unfair."""
    if verdict.is_fair:
        return ""
    return f" · other programs took up to {100 * max(verdict.others.values()):.0f} % of the cores"


def _title(verdict: Verdict) -> str:
    if not verdict.passed or verdict.speedup <= 1:
        return "Time to first token of every turn"
    return (
        f"A user who comes back sees the first token {verdict.speedup:.0f} times sooner, "
        "and the same answer"
    )
