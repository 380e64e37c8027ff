# SPDX-License-Identifier: Apache-2.0
"""The demo itself, short, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.demo.tests.models import write_hub_model

ROOT = Path(__file__).parents[3]
SHORT = ["--users", "3", "--turns", "2", "--tokens", "700", "--answer-tokens", "8"]
# The text is that of the Python at hand. With the default, 1.5, some texts leave the engine a block
# of the user who returns.
SHORT += ["--kv-conversations", "1.2"]

pytestmark = pytest.mark.engine


def run_demo(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run it in `folder`; returns the figures and all that was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "integration.demo", *SHORT, *arguments],
        cwd=folder,
        # What is a hit must not depend on how fast the machine is.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "COLUMNS": "120",
            "FLEXKV_ALWAYS_LOAD": "true",
            "FLEXKV_SSD_TIMEOUT_SECONDS": "600",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "demo.json").read_text(encoding="utf-8")), done.stdout


def check(report: dict[str, Any], output: str, folder: Path, answers: int) -> None:
    """All answers are equal, and the second turns came from FlexKV and from nowhere else."""
    assert report["verdict"]["passed"]
    assert len(report["turns"]) == 6
    for pair in report["turns"]:
        without, with_flexkv = pair["without"], pair["with_flexkv"]
        assert without["tokens"] == with_flexkv["tokens"]
        assert without["cached_tokens"] == 0
        assert (with_flexkv["cached_tokens"] > 0) == (without["number"] == 2)
    loaded = sum(pair["with_flexkv"]["cached_tokens"] for pair in report["turns"])
    assert report["verdict"]["loaded_tokens"] == loaded
    assert f"All {answers} answers are identical" in output
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_random_model(tmp_path: Path) -> None:
    report, output = run_demo(tmp_path)
    check(report, output, tmp_path, answers=9)
    restarts = report["restarts"]
    assert [pair["without"]["number"] for pair in restarts] == [2, 2, 2]
    for pair in restarts:
        assert pair["without"]["tokens"] == pair["with_flexkv"]["tokens"]
        assert pair["with_flexkv"]["cached_tokens"] > 0
    restored = sum(pair["with_flexkv"]["cached_tokens"] for pair in restarts)
    assert report["verdict"]["restored_tokens"] == restored
    assert [turn["number"] for turn in report["example"]] == [1, 1, 1, 2, 2, 2]
    answers = [tuple(pair["without"]["tokens"]) for pair in report["turns"]]
    assert len(set(answers)) == 6, "answers must depend on the text, or equality means nothing"


def test_a_model_and_a_text_of_the_users(tmp_path: Path) -> None:
    model = write_hub_model(tmp_path / "models")
    text = tmp_path / "notes.txt"
    text.write_text("The ferry leaves at nine and at noon.\n\n" * 200, encoding="utf-8")
    report, output = run_demo(
        tmp_path, "--model", str(model), "--text", str(text), "--show-answers", "--no-restart"
    )
    check(report, output, tmp_path, answers=6)
    assert report["restarts"] == report["example"] == []
    assert report["facts"]["model"] == str(model)
    assert "notes.txt" in report["facts"]["text"]
