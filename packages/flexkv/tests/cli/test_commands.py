# SPDX-License-Identifier: Apache-2.0
"""What all commands share."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from flexkv import cli
from packages.flexkv.tests.cli.stores import Cache, Flexkv

NOBODY = 65534
COMMANDS = ["stat", "verify", "clear folders"]
"""Those that work on cache directories."""
CLEAR = COMMANDS[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_directory_does_not_mean_the_current_one(
    flexkv: Flexkv, cache: Cache, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A script's variable may be empty."""
    cache.fill(1)
    monkeypatch.chdir(cache.root)
    ended = flexkv(*name.split(), "", *(["--yes"] if name == CLEAR else []))
    assert ended.code == 2
    assert "'' from DIR on the command line is empty; allowed: " in ended.err
    assert len(cache.records()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_directory_that_does_not_exist_is_one_clear_error(
    flexkv: Flexkv, tmp_path: Path, name: str
) -> None:
    ended = flexkv(*name.split(), tmp_path / "none")
    assert ended.code == 2
    assert ended.out == ""
    assert f"'{tmp_path}/none' from DIR on the command line does not exist" in ended.err
    assert "allowed: " in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", [*COMMANDS, "top"])
def test_a_path_that_cannot_be_followed_is_not_said_to_be_missing(
    flexkv: Flexkv, tmp_path: Path, name: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    ended = flexkv(*name.split(), tmp_path / "loop")
    assert (ended.code, ended.out) == (2, "")
    assert "cannot be read (Too many levels of symbolic links); allowed: " in ended.err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_is_no_cache_directory(flexkv: Flexkv, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    ended = flexkv(*name.split(), tmp_path / "file")
    assert ended.code == 2
    assert "is not a directory; allowed: " in ended.err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_directory_without_a_cache_is_bad_use_and_stays_as_it_is(
    flexkv: Flexkv, tmp_path: Path, name: str
) -> None:
    (tmp_path / "mine").mkdir()
    ended = flexkv(*name.split(), tmp_path)
    assert ended.code == 2
    assert "holds no cache" in ended.err
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_only_named_like_a_cache_is_bad_use_and_stays_as_it_is(
    flexkv: Flexkv, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "deadbeefdeadbeef"
    folder.mkdir()
    for file in ("lock", "precious.txt", "table"):
        (folder / file).write_text("mine")
    ended = flexkv(*name.split(), tmp_path, *(["--yes"] if name == CLEAR else []))
    assert ended.code == 2
    assert "holds no cache of FlexKV" in ended.err
    assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys(
        ("lock", "precious.txt", "table"), "mine"
    )


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("file", ["table", "lock", "counters.json", "slab-00000"])
def test_a_fifo_or_a_file_of_any_size_is_not_waited_for(
    flexkv: Flexkv, cache: Cache, name: str, file: str
) -> None:
    cache.fill(2)
    os.truncate(cache.folder / file, 1 << 42)
    path = cache.folder / file
    yes = ["--yes"] if name == CLEAR else []
    if name != CLEAR:
        assert flexkv(*name.split(), cache.root).code in (0, 1)
    path.unlink()
    os.mkfifo(path)
    ended = flexkv(*name.split(), cache.root, *yes)
    needs = {
        "stat": ["lock", "counters.json"],
        "verify": ["slab-00000"],
        CLEAR: ["lock", "counters.json", "slab-00000"],
    }
    assert ended.code == (2 if file == "table" else int(file in needs[name]))
    assert path.is_fifo()


@pytest.mark.parametrize("name", ["stat", "verify"])
def test_several_directories_are_looked_at_together(
    flexkv: Flexkv, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [Cache(tmp_path / part) for part in "ab"]
    for each in caches:
        each.fill(1)
    given = f"{tmp_path}/a;{tmp_path}/b"
    expected = [str(each.folder) for each in caches]

    def found(*arguments: str) -> list[str]:
        folders = flexkv(*name.split(), *arguments, "--json").json["folders"]
        return [folder.get("path") or folder["folder"] for folder in folders]

    assert found(given) == expected
    assert found(f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/a/") == expected
    monkeypatch.setenv("FLEXKV_SSD_CACHE_DIR", given)
    monkeypatch.setenv("FLEXKV_SSD_CACHE_GB", "1")
    assert found() == expected
    assert found(f"{tmp_path}/b") == expected[1:]


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_directory_and_a_setting_there_is_one_clear_error(
    flexkv: Flexkv, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes that share a store report it in the user's own one, also those of other tests.
    monkeypatch.setenv("FLEXKV_RUNTIME_DIR", str(tmp_path))
    ended = flexkv(*name.split(), *(["all"] if name == CLEAR else []))
    assert ended.code == 2
    given = "'all'" if name == CLEAR else "missing"
    assert f"DIR is {given} on the command line, and ssd_cache_dir is not set" in ended.err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_cannot_be_read_is_no_success(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache(Path(tempfile.mkdtemp()))
    cache.fill(2)
    closed = cache.root / ("f" * 16)
    shutil.copytree(cache.folder, closed)
    for path in [cache.root, *cache.root.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    for warm_up in ("stat", "verify"):  # another user may not read what these import
        cli.main([warm_up, str(cache.root)])
    capsys.readouterr()
    closed.chmod(0)
    os.seteuid(NOBODY)
    try:
        code = cli.main([*name.split(), str(cache.root), *(["--yes"] if name == CLEAR else [])])
    finally:
        os.seteuid(0)
        left = [path.name for path in cache.root.iterdir()]
        shutil.rmtree(cache.root)
    shown = capsys.readouterr()
    assert code == 1
    assert str(closed) in shown.out + shown.err
    assert "Permission denied" in shown.out + shown.err
    assert "all intact" not in shown.out
    assert sorted(left) == sorted([closed.name] + ([cache.folder.name] if name != CLEAR else []))


def test_an_unknown_command_is_bad_use(flexkv: Flexkv) -> None:
    assert flexkv("sta").code == 2
    assert flexkv().code == 2


def test_help_lists_every_command(flexkv: Flexkv) -> None:
    ended = flexkv("--help")
    assert ended.code == 0
    for command in cli.COMMANDS:
        assert command.help in ended.out
    assert flexkv("stat", "--help").out.count("--json") == 2


def test_the_distribution_installs_the_command() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    value = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["scripts"]["flexkv"]
    assert EntryPoint("flexkv", value, "console_scripts").load() is cli.run
