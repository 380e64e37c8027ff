# SPDX-License-Identifier: Apache-2.0
"""Runs the levels for one version."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection
from pathlib import Path

from compat_ci import code
from compat_ci.known import unknown_names
from compat_ci.matrix import ROOT, Engine, Level, Release
from compat_ci.results import Outcome, Outcomes
from compat_ci.static import check
from compat_ci.wheels import Tree, fetch

IN_TESTS = {"VLLM_TARGET_DEVICE": "cpu", "SGLANG_PYTHON": sys.executable}
"""Without the first the CUDA build of vLLM, where a release has no other, finds no platform on a
machine without a GPU; the CPU builds run on CPUs in any case. By the second, tests that start
SGLang start the one that is tested."""


def run_release(engine: Engine, release: Release, top: Level, cache: Path) -> Outcomes:
    """Run the levels up to `top`, and none above one that fails.

    The levels above the static one need the release installed beside this Python's packages.

    Raises:
        subprocess.CalledProcessError: the wheel cannot be had.
    """
    outcomes: Outcomes = {}
    for level in top.upto():
        if level is Level.STATIC:
            tree = fetch(release.distribution, release.version, cache)
            outcome = static(engine, tree, release.accepted, release.torch)
        else:
            outcome = _tests(engine, engine.tests[level])
        outcomes[level] = outcome
        if not outcome.passed:
            break
    return outcomes


def static(
    engine: Engine, tree: Tree, accepted: Collection[str] = (), torch: str | None = None
) -> Outcome:
    """The static level.

    Args:
        engine: with the adapter.
        tree: of the version.
        accepted: findings to leave out, beside those that the engine's section names.
        torch: what the version is thought to pin; None if nobody has said so.
    """
    reasons = [str(finding) for finding in check(engine, tree, [*engine.accepted, *accepted])]
    reasons += unknown_names(engine, tree)
    pinned = tree.pinned("torch")
    if torch is not None and pinned != torch:
        reasons.append(f"versions.toml says that it pins torch {torch}; it pins {pinned}")
    files = sum(1 for _ in tree.path.rglob("*.py"))
    return _outcome(engine, f"{files} files", reasons)


def _tests(engine: Engine, paths: Collection[str]) -> Outcome:
    """A level that pytest runs."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *paths]
        status = subprocess.run(
            command, cwd=ROOT, env=os.environ | IN_TESTS, check=False
        ).returncode
        cases = list(ET.parse(report).iter("testcase")) if report.is_file() else []
    reasons = [
        f"{case.get('name')}: {_cause(trouble)}"
        for case in cases
        for trouble in [*case.iter("failure"), *case.iter("error")]
    ]
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    passed = len(cases) - skipped - len(reasons)
    if not reasons and (status != 0 or passed <= 0):
        reasons = [f"pytest ended with {status}, {passed} tests passed"]
    return _outcome(
        engine, f"{passed} tests" + (f", {skipped} skipped" if skipped else ""), reasons
    )


def _cause(trouble: ET.Element) -> str:
    """What pytest marks as the error, else the first line of its message."""
    marked = re.search(r"^E +(.*)$", trouble.text or "", re.MULTILINE)
    return marked[1] if marked else (trouble.get("message") or "no message").splitlines()[0]


def _outcome(engine: Engine, checked: str, reasons: list[str]) -> Outcome:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Outcome(not reasons, checked, today, code.commit(engine), code.digest(engine), reasons)
