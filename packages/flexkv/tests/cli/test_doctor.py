# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexkv.preflight.findings import Level
from packages.flexkv.tests.cli import command
from packages.flexkv.tests.cli.command import Fork
from packages.flexkv.tests.cli.hung_mount import hangs_at_once, hung
from packages.flexkv.tests.cli.stores import Cache, Ended, snapshot

Doctor = Callable[..., Ended]
NOBODY = 65534


def environ_of(folder: Path, **settings: object) -> dict[str, str]:
    """An environment with settings, and a runtime directory below `folder`."""
    environ = {k: v for k, v in os.environ.items() if "FLEXKV" not in k}
    environ["FLEXKV_RUNTIME_DIR"] = str(folder / "run")
    return environ | {name: str(value) for name, value in settings.items()}


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Runs the command with `environ_of` settings."""

    def run(*arguments: object, **settings: object) -> Ended:
        return command.run("doctor", *arguments, environ=environ_of(tmp_path, **settings))

    return run


def levels(ended: Ended) -> dict[str, str]:
    """The most severe level of each check."""
    order = [level.value for level in Level]
    found: dict[str, str] = {}
    for each in ended.json:
        worst = max(order.index(each["level"]), order.index(found.get(each["check"], "ok")))
        found[each["check"]] = order[worst]
    return found


def test_a_machine_that_fits_has_no_problem(doctor: Doctor, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = {"FLEXKV_SSD_CACHE_DIR": disk, "FLEXKV_SSD_CACHE_GB": 0.01}
    ended = doctor("--seconds", "0.2", FLEXKV_CPU_CACHE_GB=0.1, **settings)
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert ended.out.splitlines()[-1].startswith("problems: 0")
    found = re.search(r"writes ([\d.]+) GB/s, reads ([\d.]+) GB/s", ended.out)
    assert found
    assert float(found[1]) > 0
    assert float(found[2]) > 0
    assert list(disk.iterdir()) == []
    assert not (tmp_path / "run").exists()


def test_what_a_cache_directory_holds_stays_as_it_is(doctor: Doctor, cache: Cache) -> None:
    cache.fill(9)
    (cache.root / "mine.txt").write_text("precious")
    before = snapshot(cache.root)
    settings = {"FLEXKV_SSD_CACHE_DIR": cache.root, "FLEXKV_SSD_CACHE_GB": 0.01}
    assert doctor("--seconds", "0.2", **settings).code == 0
    assert snapshot(cache.root) == before


def test_too_little_memory_is_a_problem(doctor: Doctor) -> None:
    ended = doctor("--seconds", "0", FLEXKV_CPU_CACHE_GB=1 << 20)
    assert ended.code == 1
    (line,) = re.findall(r"problem  memory: .*\n +-> .*", ended.out)
    assert "cpu_cache_gb is 1048576 GiB" in line
    assert "allowed: at most" in line


def test_too_little_room_is_a_problem(doctor: Doctor, tmp_path: Path) -> None:
    settings = {"FLEXKV_SSD_CACHE_DIR": tmp_path, "FLEXKV_SSD_CACHE_GB": 1 << 20}
    ended = doctor("--seconds", "0", "--json", **settings)
    assert ended.code == 1
    assert levels(ended)[f"disk {tmp_path}"] == "problem"


def test_a_directory_that_does_not_exist_is_not_created(doctor: Doctor, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    settings = {"FLEXKV_SSD_CACHE_DIR": path, "FLEXKV_SSD_CACHE_GB": 0.01}
    ended = doctor(**settings)
    assert ended.code == 0
    assert f"disk {path}: does not exist yet: an engine creates it" in ended.out
    assert not (tmp_path / "a").exists()


def test_each_drive_has_its_share_of_the_room(doctor: Doctor, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    settings = {"FLEXKV_SSD_CACHE_DIR": f"{tmp_path}/a;{tmp_path}/b", "FLEXKV_SSD_CACHE_GB": 0.5}
    ended = doctor("--seconds", "0", **settings)
    assert ended.out.count("256.00 MiB wanted") == 2


def test_misspelt_variables_are_problems_and_the_rest_is_checked(doctor: Doctor) -> None:
    ended = doctor("--seconds", "0", "--json", FLEXKV_CPU_CASHE_GB=4)
    assert ended.code == 1
    (found,) = (each for each in ended.json if each["check"] == "settings")
    assert "did you mean 'FLEXKV_CPU_CACHE_GB'?" in found["text"]
    assert found["change"].startswith("allowed: ")
    assert levels(ended)["kernel"] != "problem"


def test_addresses_are_not_printed(doctor: Doctor) -> None:
    url = "s3://bucket/secret-place"
    ended = doctor("--seconds", "0", FLEXKV_OBJECTS_URL=url)
    assert "objects_url='...'" in ended.out
    assert "secret-place" not in ended.out + ended.err


def test_a_runtime_directory_of_others_is_a_problem(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o777)
    (tmp_path / "run").chmod(0o777)
    ended = doctor("--seconds", "0", "--json")
    assert ended.code == 1
    assert levels(ended)["runtime_dir"] == "problem"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o777


def test_variables_of_lmcache_are_named_with_the_page_that_translates_them(doctor: Doctor) -> None:
    ended = doctor("--json", LMCACHE_CHUNK_SIZE=256)
    (advice,) = (each for each in ended.json if each["level"] == "advice")
    assert "LMCACHE_CHUNK_SIZE" in advice["text"]
    assert "'Coming from other caches'" in advice["text"]


def test_turned_off_is_said(doctor: Doctor) -> None:
    ended = doctor("--seconds", "0", ENABLE_FLEXKV="0")
    assert "advice   settings: FlexKV is turned off" in ended.out


BAD_SETTINGS = {
    "memory that is no number": {"FLEXKV_CPU_CACHE_GB": "much"},
    "negative memory": {"FLEXKV_CPU_CACHE_GB": "-1"},
    "a directory without a size": {"FLEXKV_SSD_CACHE_DIR": "/tmp"},
    "a size without a directory": {"FLEXKV_SSD_CACHE_GB": "1"},
    "a relative directory": {"FLEXKV_SSD_CACHE_DIR": "kv", "FLEXKV_SSD_CACHE_GB": "1"},
    "an unknown policy": {"FLEXKV_EVICTION_POLICY": "mru"},
    "a file that does not exist": {"FLEXKV_CONFIG_PATH": "/none.yaml"},
    "a directory as a file": {"FLEXKV_CONFIG_PATH": "/tmp"},
    "a master without metadata": {"FLEXKV_MOONCAKE_MASTER": "host:1"},
    "a variable in lower case": {"flexkv_cpu_cache_gb": "1"},
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_one_problem(doctor: Doctor, case: str) -> None:
    ended = doctor("--seconds", "0", "--json", **BAD_SETTINGS[case])
    assert ended.code == 1
    (found,) = (each for each in ended.json if each["check"] == "settings")
    assert found["level"] == "problem"
    assert found["change"].startswith("allowed: ")


BAD_DIRECTORIES = (
    "a file",
    "a fifo",
    "a socket",
    "a file above it",
    "a broken link",
    "a link's loop",
)


@pytest.mark.parametrize("kind", BAD_DIRECTORIES)
def test_what_is_no_directory_is_a_problem(doctor: Doctor, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    with socket.socket(socket.AF_UNIX) as listener:
        match kind:
            case "a file":
                path.touch()
            case "a fifo":
                os.mkfifo(path)
            case "a socket":
                listener.bind(str(path))
            case "a file above it":
                path.touch()
                path /= "below"
            case "a broken link":
                path.symlink_to(tmp_path / "none")
            case "a link's loop":
                path.symlink_to(path)
        settings = {"FLEXKV_SSD_CACHE_DIR": path, "FLEXKV_SSD_CACHE_GB": 0.01}
        ended = doctor("--json", **settings)
    assert ended.code == 1
    assert levels(ended)[f"disk {path}"] == "problem"


@pytest.mark.parametrize("seconds", ["-1", "61", "nan", "inf", "soon", ""])
def test_bad_input_is_one_clear_error(doctor: Doctor, seconds: str) -> None:
    ended = doctor(f"--seconds={seconds}")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert "; allowed: " in ended.err


@pytest.mark.parametrize("arguments", [["--fast"], ["/tmp"]])
def test_unknown_arguments_are_bad_use(doctor: Doctor, arguments: list[str]) -> None:
    ended = doctor(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "unrecognized arguments" in ended.err


@dataclass(frozen=True, slots=True)
class Waiting:
    """Commands under way on what hangs.

    Attributes:
        folder: a directory that hangs.
        on_drives: the command with `folder` alone, and with `folder` and a good one, by their
            number.
        on_file: the command with a file of settings in a directory that hangs.
    """

    folder: Path
    on_drives: Mapping[int, Fork]
    on_file: Fork


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Waiting]:
    """All commands run at the same time."""
    root = tmp_path_factory.mktemp("waiting")
    drives, config = [root / "1", root / "2"], root / "config"
    for folder in (*drives, config):
        folder.mkdir()
    with contextlib.ExitStack() as stack:

        def start(**settings: object) -> Fork:
            environ = environ_of(root, **settings)
            process = Fork("doctor", "--seconds", "0", environ=environ, patch=hangs_at_once)
            stack.callback(process.kill)
            return process

        stack.enter_context(hung(drives[0]))
        stack.enter_context(hung(config))
        on_drives = {
            number: start(
                FLEXKV_SSD_CACHE_DIR=";".join(map(str, drives[:number])), FLEXKV_SSD_CACHE_GB=0.01
            )
            for number in (1, 2)
        }
        on_file = start(FLEXKV_CONFIG_PATH=config / "flexkv.yaml")
        yield Waiting(drives[0], on_drives, on_file)


@pytest.mark.parametrize("drives", [1, 2])
def test_a_mount_that_hangs_is_a_problem_and_hides_nothing(waiting: Waiting, drives: int) -> None:
    ended = waiting.on_drives[drives].end()
    assert ended.code == 1
    assert re.search(r"(ok|advice) +kernel: ", ended.out)
    assert f"problem  disk {waiting.folder}: no answer within 15 s" in ended.out


def test_a_file_of_settings_that_hangs_hides_nothing(waiting: Waiting) -> None:
    ended = waiting.on_file.end()
    assert ended.code == 1
    assert "problem  settings: no answer within 15 s" in ended.out
    assert re.search(r"(ok|advice) +kernel: ", ended.out)


def test_the_findings_are_json(doctor: Doctor) -> None:
    ended = doctor("--seconds", "0", "--json")
    assert all(set(each) == {"check", "level", "text", "change"} for each in json.loads(ended.out))
    checks = {each["check"] for each in ended.json}
    assert {"settings", "kernel", "memory", "huge pages", "packages", "runtime_dir"} <= checks
