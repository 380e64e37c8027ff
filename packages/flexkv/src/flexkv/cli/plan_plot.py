# SPDX-License-Identifier: Apache-2.0
"""Draws the curves of `flexkv plan` into a file. It needs matplotlib, which the extra `plot`
installs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flexkv.cli.plan_report import Report
from flexkv.types.errors import TraceError

_ENDINGS = (".png", ".svg", ".pdf")
_INCHES = (9.0, 8.0 / 3)
"""The width, and the height of one curve."""
_DOTS = 120


def check_plot(path: str) -> None:
    """Check whether `draw` can draw to `path`. Raises TraceError if matplotlib is missing, the
    ending is unknown, or there is no such directory."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.splitext(path)[1].lower() not in _ENDINGS:
        raise TraceError(f"{path!r} from --plot; allowed: a file ending in {', '.join(_ENDINGS)}")
    if not os.path.isdir(folder) or os.path.isdir(path):
        raise TraceError(f"{path!r} from --plot; allowed: a file in a directory that exists")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TraceError(
            f"{path!r} from --plot needs matplotlib, which is not installed; allowed: after "
            "pip install 'flexkv[plot]'"
        ) from None


def draw(path: str, report: Report) -> None:
    """Draw to the file at `path`, which `check_plot` has accepted. Raises OSError if the file
    cannot be written."""
    from matplotlib.figure import Figure

    sizing = report.sizing
    points = [row.point for row in sizing.rows]
    gib = [report.gib(each.blocks) for each in points]
    curves: list[tuple[str, Sequence[float | None]]] = [
        ("hit rate (% of prompt tokens)", [100 * each.hit_rate for each in points])
    ]
    if report.cost is not None:
        curves.append(("prefill saved (s)", [each.saved_seconds for each in points]))
    if report.scales:
        written = [report.written_a_day(each.written_blocks) for each in points]
        curves.append(("disk writes (GiB a day)", written))
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(curves)))
    figure.suptitle(report.read.trace.name)
    axes = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (label, values) in zip(axes, curves, strict=True):
        axis.plot(gib, values, marker=".", label="lru")
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    outcomes = [each for row in sizing.rows for each in row.outcomes]
    for name in dict.fromkeys(each.setup.policy for each in outcomes):
        of_policy = [each for each in outcomes if each.setup.policy == name]
        sizes = [report.gib(each.setup.memory_blocks) for each in of_policy]
        axes[0].plot(sizes, [100 * each.hit_rate for each in of_policy], marker="x", label=name)
    if sizing.knee is not None:
        knee = report.gib(sizing.knee.blocks)
        for axis in axes:
            axis.axvline(knee, linestyle=":", color="gray")
        axes[0].annotate("knee", (knee, 0), xytext=(3, 3), textcoords="offset points")
    if outcomes:
        axes[0].legend()
    axes[-1].set_xlabel("cache (GiB)")
    figure.tight_layout()
    figure.savefig(path, dpi=_DOTS)
