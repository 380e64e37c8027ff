# SPDX-License-Identifier: Apache-2.0
"""Sessions between real processes: meeting, disagreeing, dying."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import flexkv.session
from flexkv import ArenaError, ArenaSpec, BlockFormat, Session, Shard, attach, join, lead

SHARD_BYTES = 8192


def shard(rank: int, fingerprint: str = "same") -> Shard:
    return Shard(rank, fingerprint, 2, SHARD_BYTES)


def plan(block_format: BlockFormat) -> ArenaSpec:
    return ArenaSpec(block_format, 4)


@contextlib.contextmanager
def led(root: Path, name: str = "engine", ranks: int = 1) -> Iterator[Session]:
    session = lead(str(root), name, shard(0), ranks, plan, threads=1)
    try:
        yield session
    finally:
        session.close()


LEADER = """
import sys, time
from flexkv import ArenaSpec, Shard, lead
session = lead(sys.argv[1], sys.argv[2], Shard(0, "same", 2, 8192), 1,
               lambda fmt: ArenaSpec(fmt, 4), threads=1)
print("leading", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def leading_process(root: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LEADER, str(root), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "leading\n"
            yield process
        finally:
            process.kill()


def test_all_processes_get_the_same_arena(tmp_path: Path) -> None:
    joined: list[Session] = []
    thread = threading.Thread(target=lambda: joined.append(join(str(tmp_path), "engine", shard(1))))
    thread.start()
    with led(tmp_path, ranks=2) as leader:
        thread.join()
        scheduler = attach(str(tmp_path), "engine")
        assert leader.info == joined[0].info == scheduler.info
        assert scheduler.arena.spec.format.shard_bytes == (SHARD_BYTES, SHARD_BYTES)
        cell = scheduler.arena.board.acquire()
        assert cell is not None
        for session, rank in ((leader, 0), (joined[0], 1)):
            session.arena.board.report(cell, rank, flexkv.Status.DONE)
        assert scheduler.arena.board.status(cell) is flexkv.Status.DONE
        scheduler.close()
        joined[0].close()
    assert list(tmp_path.glob("*.sock")) == []


@pytest.mark.parametrize("durable", [True, False])
def test_the_scheduler_learns_whether_blocks_outlive_the_engine(
    tmp_path: Path, durable: bool
) -> None:
    mine = replace(shard(0), durable=durable)
    session = lead(str(tmp_path), "engine", mine, 1, plan, threads=1)
    scheduler = attach(str(tmp_path), "engine")
    assert scheduler.info.durable is durable
    scheduler.close()
    session.close()


def test_ranks_must_agree_on_that(tmp_path: Path) -> None:
    def follow() -> None:
        with contextlib.suppress(ArenaError):
            join(str(tmp_path), "engine", replace(shard(1), durable=False))

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(ArenaError, match=r"rank 1 .* has another KV cache than rank 0"):
        lead(str(tmp_path), "engine", shard(0), 2, plan, threads=1)
    thread.join()


def test_socket_and_directory_are_private(tmp_path: Path) -> None:
    root = tmp_path / "new" / "runtime"
    with led(root):
        (path,) = root.glob("*.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert stat.S_IMODE((root / "lock").stat().st_mode) == 0o600


def test_a_second_engine_of_the_same_id_is_refused(tmp_path: Path) -> None:
    with (
        leading_process(tmp_path, "twin") as owner,
        pytest.raises(
            ArenaError, match=rf"engine id 'twin' is owned by the living process {owner.pid};"
        ),
    ):
        lead(str(tmp_path), "twin", shard(0), 1, plan, threads=1)


def test_engines_of_different_ids_do_not_meet(tmp_path: Path) -> None:
    with led(tmp_path, "one"), led(tmp_path, "two"):
        assert len(list(tmp_path.glob("*.sock"))) == 2


def test_the_next_start_cleans_up_after_kill_9(tmp_path: Path) -> None:
    with leading_process(tmp_path, "killed") as owner:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        (left,) = tmp_path.glob("*.sock")
        with led(tmp_path, "other"):
            assert not left.exists()
        with led(tmp_path, "killed"):
            attach(str(tmp_path), "killed").close()


def test_ranks_that_disagree_stop_all(tmp_path: Path) -> None:
    refused: list[str] = []

    def follow() -> None:
        with pytest.raises(ArenaError) as caught:
            join(str(tmp_path), "engine", shard(1, "another model"))
        refused.append(str(caught.value))

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(ArenaError, match=r"rank 1 .* has another KV cache than rank 0"):
        lead(str(tmp_path), "engine", shard(0), 2, plan, threads=1)
    thread.join()
    assert "another KV cache" in refused[0]


def test_a_failed_plan_reaches_every_rank(tmp_path: Path) -> None:
    def no_memory(block_format: BlockFormat) -> ArenaSpec:
        raise ArenaError("no memory")

    refused: list[str] = []

    def follow() -> None:
        with pytest.raises(ArenaError) as caught:
            join(str(tmp_path), "engine", shard(1))
        refused.append(str(caught.value))

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(ArenaError, match="no memory"):
        lead(str(tmp_path), "engine", shard(0), 2, no_memory, threads=1)
    thread.join()
    assert refused == ["no memory"]
    assert list(tmp_path.glob("*.sock")) == []


def test_missing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexkv.session, "MEET_SECONDS", 0.2)
    with pytest.raises(ArenaError, match=r"ranks \[1, 2\] of engine 'engine' did not join"):
        lead(str(tmp_path), "engine", shard(0), 3, plan, threads=1)


def test_no_session_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexkv.session, "MEET_SECONDS", 0.2)
    with pytest.raises(ArenaError, match="rank 0 of engine 'nobody' does not answer"):
        attach(str(tmp_path), "nobody")


@pytest.mark.parametrize(
    "greeting", [b"\xff\xfe\n", b"[]\n", b'{"rank": {"rank": "x"}}\n', b'{"rank": 7}\n', b"{"]
)
def test_malformed_greetings_are_refused_and_lose_nothing(tmp_path: Path, greeting: bytes) -> None:
    with led(tmp_path):
        (path,) = tmp_path.glob("*.sock")
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(path))
            peer.sendall(greeting)
            peer.shutdown(socket.SHUT_WR)
            assert "not a FlexKV greeting" in json.loads(peer.recv(65536))["error"]
        attach(str(tmp_path), "engine").close()


def test_unwritable_directory_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ArenaError, match=r"runtime_dir '.*file/below' cannot be used: .*; allowed"):
        lead(str(file / "below"), "engine", shard(0), 1, plan, threads=1)


def test_a_long_directory_works(tmp_path: Path) -> None:
    with led(tmp_path / ("x" * 200)):
        attach(str(tmp_path / ("x" * 200)), "engine").close()
