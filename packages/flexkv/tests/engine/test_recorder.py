# SPDX-License-Identifier: Apache-2.0
"""Recordings are private, bounded and complete, and never in an engine's way."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexkv.engine import recorder as module
from flexkv.engine.recorder import Recorder, open_recorder
from flexkv.plan.read import read_trace
from flexkv.settings import load_config
from packages.conftest import PATIENCE_SECONDS
from packages.inside import await_writer
from packages.inside_tiers import await_opening
from packages.patience import wait_until

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(10)]
GIB = 1 << 30

Open = Callable[..., Recorder | None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    # The limit is for engines that end; here the machine may be busy.
    monkeypatch.setattr(module, "_CLOSE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(module, "_OPEN_SECONDS", PATIENCE_SECONDS)
    made: list[Recorder] = []

    def open_(prefill: Any = lambda: None, **settings: object) -> Recorder | None:
        config = load_config({"trace": str(path)} | settings, environ={})
        found = open_recorder(config, "test", 16, 4096, prefill)
        made.extend(() if found is None else [found])
        return found

    yield open_
    for each in made:
        each.close()


def record(recorder: Recorder | None, name: str, keys: list[bytes], session: str = "") -> None:
    assert recorder is not None
    recorder.scheduled(name, len(keys) * 16, 16, 32, session)
    recorder.ended(name, 7, len(keys), lambda: keys)


def test_plan_reads_what_was_recorded(opened: Open, path: Path) -> None:
    recorder = opened(prefill=lambda: (0.5, 0.25))
    record(recorder, "a", KEYS[:4], session="mine")
    record(recorder, "b", KEYS[:3])
    recorder.close()
    read = read_trace(str(path))
    first, second = read.trace.requests
    assert (read.trace.block_tokens, read.trace.block_bytes) == (16, 4096)
    assert read.trace.prefill == (0.5, 0.25)
    assert (first.prompt_tokens, first.output_tokens) == (64, 7)
    assert second.blocks == first.blocks[:3]
    assert first.session
    assert read.measured is not None
    assert (read.measured.engine_tokens, read.measured.hit_tokens) == (32, 64)


def test_a_recording_says_nothing_that_can_be_looked_up(opened: Open, path: Path) -> None:
    recorder = opened()
    record(recorder, "the-request-id", KEYS, session="mine")
    recorder.close()
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "the-request-id" not in text
    assert "mine" not in text
    for key in KEYS:
        for digest in (key.hex(), hashlib.blake2b(key, digest_size=8).hexdigest()):
            assert digest[:16] not in text


def test_another_start_has_another_salt(opened: Open, path: Path) -> None:
    for _ in range(2):
        recorder = opened()
        record(recorder, "a", KEYS[:2])
        recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first, second = (line["blocks"] for line in lines if "blocks" in line)
    assert first != second
    assert [each.blocks for each in read_trace(str(path)).trace.requests] == [[0, 1], [2, 3]]


def test_a_line_that_a_killed_engine_left_is_removed(opened: Open, path: Path) -> None:
    record(recorder := opened(), "a", KEYS[:2])
    recorder.close()
    with path.open("a") as file:
        file.write('{"t": 5, "in"')
    record(recorder := opened(), "b", KEYS[:2])
    recorder.close()
    assert len(read_trace(str(path)).trace.requests) == 2


def test_a_preempted_request_counts_once(opened: Open, path: Path) -> None:
    recorder = opened()
    recorder.scheduled("a", 64, 0, 0, "")
    recorder.scheduled("a", 64, 48, 0, "")
    recorder.ended("a", 1, 4, lambda: KEYS[:4])
    recorder.ended("a", 1, 4, lambda: KEYS[:4])
    recorder.ended("unknown", 1, 4, lambda: KEYS[:4])
    recorder.close()
    read = read_trace(str(path))
    assert len(read.trace.requests) == 1
    assert read.measured is not None
    assert read.measured.engine_tokens == 0


def test_recording_ends_at_its_bound(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 1)
    recorder = opened(trace_gb=4096 / GIB)
    for number in range(200):
        record(recorder, str(number), KEYS[:2])
    await_writer(recorder, 30)
    assert not recorder.active
    assert 3800 < path.stat().st_size <= 4096
    assert len(read_trace(str(path)).trace.requests) > 20
    assert [each.getMessage() for each in caplog.records if "trace_gb" in each.getMessage()] == [
        f"the trace {path}: it has {path.stat().st_size} bytes, and trace_gb leaves no room "
        "for more; nothing more is recorded; raise trace_gb, or name a new file"
    ]


def test_a_full_disk_ends_recording_with_one_message(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 1)
    recorder = opened()
    record(recorder, "a", KEYS[:2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    while path.read_bytes().count(b"\n") < 2:
        time.sleep(0.01)
    size = path.stat().st_size
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))  # write(2) then fails half-way
    try:
        record(recorder, "b", KEYS)
        record(recorder, "c", KEYS)
        await_writer(recorder, 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not recorder.active
    assert path.stat().st_size == size
    warned = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "File too large; nothing more is recorded" in warned[0].getMessage()


def test_names_that_cannot_be_made_end_recording_with_one_message(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 1)
    unheard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unheard.append)
    recorder = opened()
    record(recorder, "a", KEYS[:2])
    assert recorder is not None
    recorder.scheduled("b", 32, 0, 0, "")
    recorder.ended("b", 1, 2, lambda: ["no bytes"] * 2)
    record(recorder, "c", KEYS)
    await_writer(recorder, 30)
    assert not recorder.active
    assert len(read_trace(str(path)).trace.requests) == 1
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "TypeError" in warned[0]
    assert warned[0].endswith("nothing more is recorded")
    assert unheard == []


def test_what_comes_too_fast_is_left_out(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 5)
    recorder = opened()
    record(recorder, "a", KEYS[:6])
    record(recorder, "b", KEYS[:5])
    recorder.close()
    assert len(read_trace(str(path)).trace.requests) == 1
    assert "1 requests are not in the trace" in caplog.text


def test_a_fork_writes_nothing(opened: Open, path: Path) -> None:
    recorder = opened()
    record(recorder, "a", KEYS[:2])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            recorder.scheduled("b", 32, 0, 0, "")
            recorder.ended("b", 1, 2, lambda: KEYS[:2])
            code = int(recorder.active)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    recorder.close()
    assert len(read_trace(str(path)).trace.requests) == 1


def make_link(path: Path) -> None:
    (path.parent / "other").touch(0o600)
    path.symlink_to(path.parent / "other")


def make_second_name(path: Path) -> None:
    path.touch(0o600)
    os.link(path, path.parent / "other")


def make_others(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, 65534, 65534)


UNUSABLE = {
    "a link": (make_link, "Too many levels of symbolic links"),
    "a fifo": (lambda path: os.mkfifo(path, 0o600), "not a regular file"),
    "a directory": (lambda path: path.mkdir(), "Is a directory"),
    "a readable file": (lambda path: path.touch(0o644), "others can read it"),
    "a second name": (make_second_name, "has a second name"),
    "another's file": (make_others, "another user's file"),
    "another file": (lambda path: path.write_text("dear diary"), "no recording of FlexKV"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_file_that_cannot_be_used_is_one_message(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    if case == "another's file" and os.geteuid() != 0:
        pytest.skip("needs to give files away")
    make, says = UNUSABLE[case]
    umask = os.umask(0o077 if case == "another file" else 0)
    try:
        make(path)
    finally:
        os.umask(umask)
    before = path.read_bytes() if path.is_file() else None
    assert opened() is None
    (warning,) = (each.getMessage() for each in caplog.records)
    assert f"cannot record to {path} from trace: " in warning
    assert says in warning
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_file_in_a_directory_that_another_user_planted_is_not_used(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner may point a link at any file, at any time."""
    planted = tmp_path / "planted"
    planted.mkdir()
    os.chown(planted, 65534, 65534)
    tmp_path.chmod(0o1777)
    trace = str(planted / "trace.jsonl")
    assert opened(trace=trace) is None
    assert f"cannot record to {trace} from trace: {planted}: belongs to user" in caplog.text
    assert not list(planted.iterdir())


def test_two_engines_do_not_share_a_file_until_the_first_ends(
    opened: Open, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(first := opened(), "a", KEYS[:2])
    record(second := opened(), "b", KEYS[:2])
    assert "another engine records to it; nothing is recorded until it can" in caplog.text
    assert first is not None
    assert second is not None
    assert not second.active
    first.close()
    records_once_it_can(second, path, "c")


def test_a_file_whose_directory_comes_late_is_recorded_to(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "late" / "trace.jsonl"
    recorder = opened(trace=str(path))
    assert recorder is not None
    path.parent.mkdir()
    records_once_it_can(recorder, path, "a")
    failed, works = (each.getMessage() for each in caplog.records)
    assert "late: No such file or directory; nothing is recorded until it can" in failed
    assert f"FlexKV records digests and lengths of requests to {path}" in works


def test_a_file_that_opens_after_the_end_is_closed(
    opened: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answers = threading.Event(), threading.Event()
    open_ = module._open

    def slow_open(name: str) -> int:
        begun.set()
        assert answers.wait(PATIENCE_SECONDS)
        fds.append(open_(name))
        return fds[0]

    fds: list[int] = []
    monkeypatch.setattr(module, "_open", slow_open)
    monkeypatch.setattr(module, "_OPEN_SECONDS", 0.0)
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.0)
    recorder = opened()
    assert recorder is not None
    assert begun.wait(PATIENCE_SECONDS)
    recorder.close()
    answers.set()
    assert await_opening(recorder, PATIENCE_SECONDS)
    assert not recorder.active
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fds[0])


def records_once_it_can(recorder: Recorder, path: Path, name: str) -> None:
    wait_until(lambda: recorder.active)
    record(recorder, name, KEYS[:2])
    recorder.close()
    assert read_trace(str(path)).trace.requests
