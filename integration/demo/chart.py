# SPDX-License-Identifier: Apache-2.0
"""The demo's chart: time to first token of every turn, with and without FlexKV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.demo.verdict import Pair, Verdict

WITHOUT_COLOR = "#9aa3b2"
WITH_COLOR = "#0b7a6f"
INK = "#1f2937"
INK_LIGHT = "#6b7280"
BAR_WIDTH = 0.4
LEFT = 0.06  # of the figure's width, where axes and titles begin


def draw(pairs: Sequence[Pair], verdict: Verdict, facts: Mapping[str, str], path: Path) -> None:
    """Write the chart to `path`; its suffix names the format (png, svg, pdf).

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=150, facecolor="white")
    figure.subplots_adjust(left=LEFT, right=0.985, top=0.83, bottom=0.13)
    axes: Any = figure.subplots()
    places = _places(pairs)
    _bars(axes, places, pairs)
    _axes(axes, places, pairs)
    figure.suptitle(_title(verdict), x=LEFT, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes.set_title(
        f"{facts['engine']} · {facts['model']}\n{facts['talk']}",
        loc="left",
        fontsize=9,
        color=INK,
        pad=14,
    )
    axes.legend(frameon=False, loc="lower right", ncols=2, bbox_to_anchor=(1, 1.01), fontsize=9)
    figure.savefig(path)


def _places(pairs: Sequence[Pair]) -> list[float]:
    """Where each turn's bars stand: a gap after every round of users."""
    return [index + 0.6 * (pair.without.number - 1) for index, pair in enumerate(pairs)]


def _bars(axes: Any, places: Sequence[float], pairs: Sequence[Pair]) -> None:
    half = BAR_WIDTH / 2
    slow = [pair.without.ttft for pair in pairs]
    fast = [pair.with_flexkv.ttft for pair in pairs]
    axes.bar([p - half for p in places], slow, BAR_WIDTH, color=WITHOUT_COLOR, label="vLLM")
    axes.bar([p + half for p in places], fast, BAR_WIDTH, color=WITH_COLOR, label="vLLM + FlexKV")
    for shift, values, color in ((-half, slow, INK_LIGHT), (half, fast, WITH_COLOR)):
        for place, seconds in zip(places, values, strict=True):
            axes.annotate(
                f"{seconds:.2f}",
                (place + shift, seconds),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=color,
            )


def _axes(axes: Any, places: Sequence[float], pairs: Sequence[Pair]) -> None:
    axes.set_xticks(places, [pair.without.user for pair in pairs], fontsize=9)
    for number in sorted({pair.without.number for pair in pairs}):
        here = [p for p, pair in zip(places, pairs, strict=True) if pair.without.number == number]
        axes.annotate(
            f"turn {number}" + (" (nothing to reuse yet)" if number == 1 else ""),
            (sum(here) / len(here), 0),
            (0, -28),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            color=INK,
        )
    axes.set_ylabel("seconds to the first token", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _title(verdict: Verdict) -> str:
    if not verdict.passed or verdict.speedup <= 1:
        return "Time to first token of every turn"
    return (
        f"A user who comes back sees the first token {verdict.speedup:.0f} times sooner, "
        "and the same answer"
    )
