# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from flexkv import ConfigError, FlexKVError
from flexkv.system.uncaught import print_without_traceback

for _ in range(2):
    print_without_traceback(FlexKVError)
def deep():
    raise {}
deep()
"""


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        ("ConfigError('no; allowed: yes')", "flexkv.types.errors.ConfigError: no; allowed: yes\n"),
        ("ValueError('no')", None),
    ],
)
def test_only_the_last_line_of_our_own_errors_is_printed(error: str, printed: str | None) -> None:
    command = [sys.executable, "-c", PROGRAM.format(error)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    if printed is None:
        assert ended.stderr.startswith("Traceback")
        assert ended.stderr.count("ValueError: no") == 1
    else:
        assert ended.stderr == printed
