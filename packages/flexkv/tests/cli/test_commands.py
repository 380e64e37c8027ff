# SPDX-License-Identifier: Apache-2.0
"""What all commands share."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from flexkv import cli
from packages.flexkv.tests.cli.stores import Flexkv

COMMANDS = [command.NAME for command in cli.COMMANDS]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_directory_that_does_not_exist_is_one_clear_error(
    flexkv: Flexkv, tmp_path: Path, name: str
) -> None:
    ended = flexkv(name, tmp_path / "none")
    assert ended.code == 2
    assert ended.out == ""
    assert f"'{tmp_path}/none' from DIR on the command line does not exist" in ended.err
    assert "allowed: " in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_is_no_cache_directory(flexkv: Flexkv, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    ended = flexkv(name, tmp_path / "file")
    assert ended.code == 2
    assert "is not a directory; allowed: " in ended.err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_directory_without_a_cache_is_bad_use_and_stays_as_it_is(
    flexkv: Flexkv, tmp_path: Path, name: str
) -> None:
    (tmp_path / "mine").mkdir()
    ended = flexkv(name, tmp_path)
    assert ended.code == 2
    assert "holds no cache" in ended.err
    assert (tmp_path / "mine").is_dir()


def test_an_unknown_command_is_bad_use(flexkv: Flexkv) -> None:
    assert flexkv("sta").code == 2
    assert flexkv().code == 2


def test_help_lists_every_command(flexkv: Flexkv) -> None:
    ended = flexkv("--help")
    assert ended.code == 0
    for command in cli.COMMANDS:
        assert command.HELP in ended.out
    assert flexkv("stat", "--help").out.count("--json") == 2


def test_the_distribution_installs_the_command() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    value = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["scripts"]["flexkv"]
    assert EntryPoint("flexkv", value, "console_scripts").load() is cli.main
