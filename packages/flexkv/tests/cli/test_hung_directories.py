# SPDX-License-Identifier: Apache-2.0
"""`flexkv stat`, `verify` and `clear` on mounts that really hang."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flexkv import deadline
from flexkv.deadline import HungError, call_beside, call_within
from packages.conftest import PATIENCE_SECONDS
from packages.flexkv.tests.cli.hung_mount import hung
from packages.flexkv.tests.cli.screen import on_terminal
from packages.flexkv.tests.cli.stores import FINGERPRINT, Cache, Ended

COMMANDS = (("stat",), ("stat", "--json"), ("verify",), ("clear", "--yes"))


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flexkv", *arguments]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=pipe, stderr=pipe, text=True)


def end_of(process: subprocess.Popen[str]) -> Ended:
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    return Ended(process.returncode, out, err)


@contextlib.contextmanager
def beside_a_good_one(cache: Cache) -> Iterator[Mapping[str, Ended]]:
    """How the commands end on a directory that hangs and a good one; all wait at the same time."""
    cache.fill(3)
    cleared = shutil.copytree(cache.root, cache.root.parent / "cleared")
    folder = cache.root.parent / "hung"
    folder.mkdir()
    with hung(folder):
        running = {
            " ".join(command): started(
                command[0],
                f"{folder};{cleared if 'clear' in command else cache.root}",
                *command[1:],
            )
            for command in COMMANDS
        }
        yield {name: end_of(process) for name, process in running.items()}


def test_a_hung_directory_is_named_and_a_good_one_served(cache: Cache) -> None:
    with beside_a_good_one(cache) as ended:
        pass
    for name, each in ended.items():
        assert each.code == 1, (name, each)
        assert "hung' from DIR on the command line has not answered for 15 s" in each.err, name
        assert each.err.count("\n") == 1, (name, each)
    assert f"{cache.folder}\n" in ended["stat"].out
    assert ended["stat --json"].json["totals"]["used_slots"] == 3
    assert f"{cache.folder}: 3 blocks" in ended["verify"].out
    assert f"0 bad, no answer from {cache.root.parent / 'hung'}; read" in ended["verify"].out
    assert f"removed {cache.root.parent / 'cleared' / FINGERPRINT}, " in ended["clear --yes"].out
    assert not (cache.root.parent / "cleared" / FINGERPRINT).exists()


def test_a_hung_directory_alone_is_one_error(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    with hung(folder):
        running = {command: started(*command, str(folder)) for command in COMMANDS}
        ended = {command: end_of(process) for command, process in running.items()}
    for command, each in ended.items():
        assert each.code == 1, (command, each)
        assert each.err.count("\n") == 1, (command, each)
        assert str(folder) in each.err
        if "--json" in command:
            assert json.loads(each.out)["folders"] == []
        else:
            assert each.out == "", command


@pytest.mark.parametrize("command", ["stat", "verify", "clear"])
def test_ctrl_c_ends_a_command_that_hangs(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    with hung(folder):
        process = started(command, str(folder))
        wait_until_it_sleeps(process)
        process.send_signal(signal.SIGINT)
        ended = end_of(process)
    # Without Ctrl-C it would end with an error.
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def wait_until_it_sleeps(process: subprocess.Popen[str]) -> None:
    """Until a thread of the process sleeps uninterruptibly, as in a call that hangs, twice in a
    row: a read of a busy drive ends in between."""
    late = time.monotonic() + PATIENCE_SECONDS
    seen: set[str] = set()
    while time.monotonic() < late:
        now = set()
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if "fuse" in (thread / "wchan").read_text(encoding="ascii"):
                    now.add(thread.name)
        if now & seen:
            return
        seen = now
        time.sleep(0.1)
    pytest.fail("the command does not hang")


def test_a_directory_that_begins_to_hang_is_named(cache: Cache) -> None:
    """Between the question of `clear` and its answer."""
    cache.fill(2)
    with on_terminal("clear", str(cache.root)) as screen:
        screen.wait_for("Remove 1 folder")
        with hung(cache.root):
            screen.press("y\n")
            screen.wait_for(f"skipped {cache.folder}: {cache.folder} has not answered for 15 s")
            assert screen.end_by_key("") == 1
    assert len(cache.records()) == 2


def test_long_work_in_a_directory_that_answers_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine even a directory that answers may take longer than the work's limit.
    monkeypatch.setattr(
        deadline, "call_within", lambda calls, _: call_within(calls, PATIENCE_SECONDS)
    )
    seconds = 0.2
    over = threading.Event()

    def work() -> str:
        over.wait(15 * seconds)
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
