# SPDX-License-Identifier: Apache-2.0
"""Draws curves into a file. It needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.types.errors import TraceError

ENDINGS = (".png", ".svg", ".pdf")
_INCHES = (9.0, 8.0)
_DOTS = 120


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves to draw over the size of the cache. All have one value for each size."""

    title: str
    gib: Sequence[float]
    """Sizes of the cache, ascending, more than 0."""
    hit_rates: Sequence[float]
    """In percent of prompt tokens."""
    saved: Sequence[float] | None
    """Seconds of computing that hits save; None if unknown."""
    written: Sequence[float] | None
    """GiB a day, to a disk of that size; None if unknown."""
    knee: float | None
    """A size to mark, in GiB."""
    others: Sequence[tuple[str, float, float]]
    """Policy, size in GiB and hit rate in percent of other caches."""


def check_plot(path: str) -> None:
    """Check whether `draw` can draw to `path`.

    Raises:
        TraceError: matplotlib is missing, the ending is unknown, or there is no such directory.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.splitext(path)[1].lower() not in ENDINGS:
        raise TraceError(f"{path!r} from --plot; allowed: a file ending in {', '.join(ENDINGS)}")
    if not os.path.isdir(folder) or os.path.isdir(path):
        raise TraceError(f"{path!r} from --plot; allowed: a file in a directory that exists")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TraceError(
            f"{path!r} from --plot needs matplotlib, which is not installed; allowed: after "
            "pip install 'flexkv[plot]'"
        ) from None


def draw(path: str, curves: Curves) -> None:
    """Draw to the file at `path`, whose ending names the format. Call `check_plot` before.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [
        ("hit rate (% of prompt tokens)", curves.hit_rates),
        ("prefill saved (s)", curves.saved),
        ("disk writes (GiB a day)", curves.written),
    ]
    known = [(label, values) for label, values in rows if values is not None]
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(known) / len(rows)))
    figure.suptitle(curves.title)
    axes = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
    for place, (axis, (label, values)) in enumerate(zip(axes, known, strict=True)):
        axis.plot(curves.gib, values, marker=".", label="lru")
        if curves.knee is not None:
            axis.axvline(curves.knee, linestyle=":", color="gray")
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if place == 0:
            for name in dict.fromkeys(name for name, _, _ in curves.others):
                marks = [(size, rate) for other, size, rate in curves.others if other == name]
                axis.plot(*zip(*marks, strict=True), marker="x", label=name)
            if curves.knee is not None:
                axis.annotate("knee", (curves.knee, 0), xytext=(3, 3), textcoords="offset points")
            if curves.others:
                axis.legend()
    axes[-1].set_xlabel("cache (GiB)")
    figure.tight_layout()
    figure.savefig(path, dpi=_DOTS)
