# SPDX-License-Identifier: Apache-2.0
"""Tests that need SGLang and no engine, in SGLang's own Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from integration import sglang
from integration.sglang import environment

FOLDER = Path(sglang.__path__[0], "with_sglang")
ROOT = FOLDER.parents[2]


def test_tests_within_sglang_pass() -> None:
    try:
        python = environment.python()
    except environment.EnvironmentMissingError as error:
        if environment.may_be_missing():
            pytest.skip(str(error))
        raise
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
