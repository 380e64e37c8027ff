# SPDX-License-Identifier: Apache-2.0
"""Standard streams that are closed, full or gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flexkv import cli
from packages.flexkv.tests.cli.stores import Cache

COMMANDS = [command.NAME for command in cli.COMMANDS]


def shell(script: str, cache: Cache) -> subprocess.CompletedProcess[str]:
    """`script` in a shell; $flexkv is the command, $DIR the cache."""
    environment = {"flexkv": f"{sys.executable} -m flexkv", "DIR": str(cache.root)}
    ended = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "Exception ignored" not in ended.stderr, ended.stderr
    return ended


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_stream_that_is_closed_changes_nothing(cache: Cache, name: str, closed: str) -> None:
    cache.fill(2)
    yes = "--yes" if name == "clear" else ""
    assert shell(f"$flexkv {name} $DIR {yes} {closed}", cache).returncode == 0
    assert cache.folder.exists() == (name != "clear")


def test_clear_without_an_input_needs_yes(cache: Cache) -> None:
    cache.fill(1)
    ended = shell("$flexkv clear $DIR <&-", cache)
    assert ended.returncode == 2
    assert "--yes is missing" in ended.stderr
    assert cache.folder.exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_cannot_be_written_is_one_clear_error(cache: Cache, name: str) -> None:
    cache.fill(2)
    yes = "--yes" if name == "clear" else ""
    ended = shell(f"$flexkv {name} $DIR {yes} >/dev/full", cache)
    assert ended.returncode == 1
    assert ended.stderr == f"flexkv {name}: error: No space left on device\n"


def test_a_reader_that_has_enough_is_no_error(cache: Cache) -> None:
    cache.fill(2)
    ended = shell("$flexkv stat $DIR | true; exit ${PIPESTATUS[0]}", cache)
    assert ended.returncode in (0, 1)
    assert ended.stderr == ""
