# SPDX-License-Identifier: Apache-2.0
"""`flexkv clear` and a shared folder, with nodes that run meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")

from shared_node import FINGERPRINT, Remote, file_of

from flexkv.tiers.epochs import FRESH_SECONDS
from flexkv.tiers.objects.shared_folder import Freed, remove_older
from packages.flexkv.tests.cli.stores import Flexkv, FlexkvOnTerminal
from packages.patience import patient_objects

Start = Callable[[], Remote]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kv"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def start(folder: Path, at_end: ExitStack) -> Start:
    settings = patient_objects(f"file://{folder}")
    return lambda: at_end.enter_context(closing(Remote(settings, {})))


def test_after_a_reset_or_a_clear_nothing_of_before_is_found(
    start: Start, folder: Path, flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = start(), start()
    one.do("store", "abc")
    monkeypatch.setenv("FLEXKV_OBJECTS_URL", f"file://{folder}")
    ended = flexkv("clear", "stores", "all", "--yes")
    assert (ended.code, ended.out) == (0, f"cleared file://{folder}, fingerprint {FINGERPRINT}\n")
    assert other.do("fetch", "abc") == ""
    one.do("store", "de")
    assert other.do("fetch", "de") == "de"
    one.do("reset")
    time.sleep(2 * FRESH_SECONDS)
    assert start().do("fetch", "de") == ""


def test_old_blocks_are_removed_and_engines_go_on(
    start: Start, folder: Path, flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    one.do("store", "abc")
    old = file_of(folder, "c")
    left = old.with_name(old.name + "#1")  # by a writer that was killed
    left.write_bytes(b"part")
    for path in (old, left):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setenv("FLEXKV_OBJECTS_URL", f"file://{folder}")
    dry = flexkv("clear", "older", "7d", "--dry-run")
    assert dry.code == 0
    assert dry.out.startswith(f"would remove 2 blocks of file://{folder}, ")
    assert old.exists()
    assert left.exists()
    ended = flexkv("clear", "older", "7d", "--yes")
    assert ended.code == 0
    assert dry.out == f"would remove{ended.out.removeprefix('removed')}"
    assert ended.out.startswith(f"removed 2 blocks of file://{folder}, ")
    assert not old.exists()
    assert not left.exists()
    other = start()
    assert other.do("fetch", "abc") == "ab"
    assert other.do("store", "abc") == "1"
    assert start().do("fetch", "abc") == "abc"
    size = sum(path.stat().st_size for path in (folder / "blocks").rglob("*") if path.is_file())
    assert remove_older(f"file://{folder}", -60) == Freed(3, size)
    assert {path.name for path in folder.rglob("*")} == {"blocks", "epochs", FINGERPRINT}


@pytest.mark.parametrize(
    ("arguments", "url", "said"),
    [
        (["7"], "file:///x", "AGE is '7'"),
        (["7d", "DIR"], "file:///x", "unrecognized arguments: DIR"),
        (["7d"], "s3://bucket", "objects_url is 's3://bucket'"),
        (["7d"], "", "objects_url is not set; allowed: with objects_url=file"),
        (["7d"], "file:///nowhere/kv", "No such file or directory"),
    ],
)
def test_clear_says_what_is_wrong_with_an_age(
    flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch, arguments: list[str], url: str, said: str
) -> None:
    monkeypatch.setenv("FLEXKV_OBJECTS_URL", url)
    ended = flexkv("clear", "older", *arguments, "--yes")
    assert ended.code == 2
    assert said in ended.err


def test_removing_old_blocks_asks_first(
    flexkv_on_terminal: FlexkvOnTerminal,
    start: Start,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start().do("store", "a")
    monkeypatch.setenv("FLEXKV_OBJECTS_URL", f"file://{folder}")
    ended = flexkv_on_terminal("clear", "older", "0s", answer="n\n")
    assert ended.code == 1
    assert f"Remove blocks older than 0s in file://{folder}?" in ended.out
    assert file_of(folder, "a").exists()
    assert flexkv_on_terminal("clear", "older", "0s", answer="y\n").code == 0
    assert not list((folder / "blocks").iterdir())
