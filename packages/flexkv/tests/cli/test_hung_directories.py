# SPDX-License-Identifier: Apache-2.0
"""`flexkv stat`, `verify` and `clear` on mounts that really hang."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexkv.cli import common
from flexkv.types import deadline
from flexkv.types.deadline import HungError, call_beside, call_within
from packages.conftest import PATIENCE_SECONDS
from packages.flexkv.tests.cli.command import Fork
from packages.flexkv.tests.cli.hung_mount import hanging, hangs_at_once, hung
from packages.flexkv.tests.cli.screen import Screen, on_terminal
from packages.flexkv.tests.cli.stores import FINGERPRINT, Cache, Flexkv

COMMANDS = (
    (("stat",), ()),
    (("stat",), ("--json",)),
    (("verify",), ()),
    (("clear", "folders"), ("--yes",)),
)
"""The words before and behind the directories."""


def started(*arguments: str, **settings: str) -> Fork:
    return Fork(*arguments, environ={**os.environ, **settings}, patch=hangs_at_once)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Commands under way on directories that hang.

    Attributes:
        good: a cache of three blocks.
        cleared: a copy of it.
        folder: a directory that hangs.
        beside: commands on `folder` and a good one, which is `cleared` for `clear`, else `good`.
        alone: commands on nothing but a directory that hangs.
        file: in `folder`.
        on_file: commands that need `file`.
        late: a cache of two blocks; it hangs since the user has answered the question of `clear`.
        screen: of that command.
        hang: ends the hang of `late`.
    """

    good: Cache
    cleared: Path
    folder: Path
    beside: Mapping[str, Fork]
    alone: Mapping[str, Fork]
    file: str
    on_file: Sequence[Fork]
    late: Cache
    screen: Screen
    hang: contextlib.ExitStack


def all_of(words: tuple[str, ...]) -> list[str]:
    """What says that the directories of the settings are meant."""
    return ["all"] if words[0] == "clear" else []


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Waiting]:
    """All commands run at the same time."""
    root = tmp_path_factory.mktemp("waiting")
    good, late = Cache(root / "cache"), Cache(root / "late")
    good.fill(3)
    late.fill(2)
    cleared = shutil.copytree(good.root, root / "cleared")
    folder, lonely = root / "hung", root / "lonely"
    folder.mkdir()
    lonely.mkdir()
    file, trace = str(folder / "file"), str(root / "trace.jsonl")
    line = '{"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [0]}'
    Path(trace).write_text(f"{line}\n", encoding="utf-8")
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **settings: str) -> Fork:
            process = started(*arguments, **settings)
            stack.callback(process.kill)
            return process

        screen = stack.enter_context(
            on_terminal("clear", "folders", str(late.root), patch=hangs_at_once)
        )
        screen.wait_for("Remove 1 folder")
        stack.enter_context(hung(folder))
        stack.enter_context(hung(lonely))
        hang = stack.enter_context(contextlib.ExitStack())
        hang.enter_context(hung(late.root))
        screen.press("y\n")
        beside = {}
        for words, options in COMMANDS:
            other = cleared if words[0] == "clear" else good.root
            beside[" ".join(words + options)] = start(*words, f"{folder};{other}", *options)
        alone = {
            " ".join(words + options): start(*words, str(lonely), *options)
            for words, options in COMMANDS
        }
        on_file = [
            *(
                start(*words, *all_of(words), *options, FLEXKV_CONFIG_PATH=file)
                for words, options in COMMANDS
            ),
            start("stat", FLEXKV_RUNTIME_DIR=file, FLEXKV_OBJECTS_URL="s3://bucket"),
            start("plan", file, "--token-bytes", "1"),
            start("plan", trace, "--model", file),
            start("plan", trace, "--token-bytes", "1", "--plot", f"{file}.svg"),
        ]
        yield Waiting(good, cleared, folder, beside, alone, file, on_file, late, screen, hang)


def test_a_hung_directory_is_named_and_a_good_one_served(waiting: Waiting) -> None:
    ended = {name: process.end() for name, process in waiting.beside.items()}
    good, cleared = waiting.good, waiting.cleared
    for name, each in ended.items():
        assert each.code == 1, (name, each)
        assert "hung' from DIR on the command line has not answered for 15 s" in each.err, name
        assert each.err.count("\n") == 1, (name, each)
    assert f"{good.folder}\n" in ended["stat"].out
    assert ended["stat --json"].json["totals"]["used_slots"] == 3
    assert f"{good.folder}: 3 blocks" in ended["verify"].out
    assert f"0 bad, no answer from {waiting.folder}; read" in ended["verify"].out
    assert f"removed {cleared / FINGERPRINT}, " in ended["clear folders --yes"].out
    assert not (cleared / FINGERPRINT).exists()


def test_a_hung_directory_is_named_beside_one_that_does_not_exist(
    flexkv: Flexkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()

    def first(calls: Collection[Future[Any]], _: float) -> Any:
        return futures.wait(calls, return_when=futures.FIRST_COMPLETED)

    monkeypatch.setattr(common, "folders_below", lambda *_: hangs.wait())
    monkeypatch.setattr(deadline, "wait", first)
    ended = flexkv("stat", f"{tmp_path};{tmp_path / 'none'}")
    hangs.set()
    assert (ended.code, ended.out) == (2, "")
    assert f"{str(tmp_path)!r} from DIR on the command line has not answered" in ended.err
    assert "does not exist" in ended.err


def test_a_hung_directory_alone_is_one_error(waiting: Waiting) -> None:
    for name, process in waiting.alone.items():
        each = process.end()
        assert each.code == 1, (name, each)
        assert each.err.count("\n") == 1, (name, each)
        assert "lonely" in each.err
        if "--json" in name:
            assert json.loads(each.out)["folders"] == []
        else:
            assert each.out == "", name


def test_a_directory_that_begins_to_hang_is_named(waiting: Waiting) -> None:
    """Between the question of `clear` and its answer."""
    folder = waiting.late.folder
    waiting.screen.wait_for(f"skipped {folder}: {folder} has not answered for 15 s")
    assert waiting.screen.end_by_key("") == 1
    waiting.hang.close()
    assert len(waiting.late.records()) == 2


def test_a_file_that_hangs_is_one_error(waiting: Waiting) -> None:
    """Settings, a trace, a model's configuration, a picture, files of running engines."""
    for process in waiting.on_file:
        each = process.end()
        assert (each.code, each.out, each.err.count("\n")) == (2, "", 1), each
        assert waiting.file in each.err
        assert "has not answered for 15 s: the drive, the network or the driver" in each.err


@pytest.mark.parametrize("command", [("stat",), ("verify",), ("clear", "folders")])
def test_ctrl_c_ends_a_command_that_hangs(tmp_path: Path, command: tuple[str, ...]) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    with hung(folder):
        process = Fork(*command, folder)  # not patched: it waits 15 s
        wait_until_it_sleeps(process)
        process.send_signal(signal.SIGINT)
        ended = process.end()
    # Without Ctrl-C it would end with an error.
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def wait_until_it_sleeps(process: Fork) -> None:
    """Until a thread of the process sleeps uninterruptibly, as in a call that hangs, twice in a
    row: a read of a busy drive ends in between."""
    late = time.monotonic() + PATIENCE_SECONDS
    seen: set[str] = set()
    while time.monotonic() < late:
        now = hanging(process.pid)
        if now & seen:
            return
        seen = now
        time.sleep(0.1)
    pytest.fail("the command does not hang")


def test_long_work_in_a_directory_that_answers_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine even a directory that answers may take longer than the work's limit.
    monkeypatch.setattr(
        deadline, "call_within", lambda calls, _: call_within(calls, PATIENCE_SECONDS)
    )
    monkeypatch.setattr(deadline, "_LOOK_SECONDS", 0.1)
    seconds = 0.2
    over = threading.Event()

    def work() -> str:
        over.wait(5 * seconds)
        return "done"

    assert call_beside(str(tmp_path), work, seconds) == "done"
    # Where nothing is, that is the answer.
    assert call_beside(str(tmp_path / "gone"), work, seconds) == "done"


def test_work_is_left_behind_where_a_directory_hangs(tmp_path: Path) -> None:
    with hung(tmp_path), pytest.raises(HungError, match=f"{tmp_path} has not answered for 0.2 s"):
        call_beside(str(tmp_path), lambda: os.listdir(tmp_path), 0.2)


def test_errors_of_the_work_are_raised(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        call_beside(str(tmp_path), lambda: os.listdir(__file__))
