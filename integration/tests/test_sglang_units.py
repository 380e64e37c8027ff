# SPDX-License-Identifier: Apache-2.0
"""Tests that need SGLang and no engine, in SGLang's own Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integration" / "sglang" / "with_sglang"


def test_tests_within_sglang_pass(sglang: Path) -> None:
    command = [str(sglang), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
