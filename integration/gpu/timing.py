# SPDX-License-Identifier: Apache-2.0
"""Repeats and medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from integration.bench.rows import Goal, Row


def interleaved(copies: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every copy in every round, in turns, so that a drift of the device meets all.

    One more round, the first, warms up; each round begins with another copy.
    """
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    names = list(copies)
    for repeat in range(repeats + 1):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            copies[name]()
            taken = time.perf_counter() - start
            if repeat > 0:
                seconds[name].append(taken)
    return seconds


def rates(seconds: list[float], size: int) -> list[float]:
    """GB/s of transfers of `size` bytes."""
    return [size / taken / 1e9 for taken in seconds]


def ratio_of_rates(
    what: str, goal: Goal | None, ours: tuple[str, list[float]], theirs: tuple[str, list[float]]
) -> Row:
    """How much faster ours is: the ratio of the medians of GB/s."""
    (our_name, our_rates), (their_name, their_rates) = ours, theirs
    our_median, their_median = statistics.median(our_rates), statistics.median(their_rates)
    return Row(
        what=what,
        value=our_median / their_median,
        unit="ratio",
        goal=goal,
        detail=f"{our_median:.2f} GB/s ÷ {their_median:.2f} GB/s, medians of {len(our_rates)}",
        samples={our_name: our_rates, their_name: their_rates},
        unit_of_samples="GB/s",
    )


def median_row(what: str, goal: Goal | None, samples: list[float], unit: str, detail: str) -> Row:
    """The median of samples that are in the unit of the row."""
    text = f"{detail}, median of {len(samples)}" if detail else f"median of {len(samples)}"
    return Row(what, statistics.median(samples), unit, goal, text, {"samples": samples}, unit)
