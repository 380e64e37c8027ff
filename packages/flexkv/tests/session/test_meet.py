# SPDX-License-Identifier: Apache-2.0
"""Sessions between real processes: meeting, disagreeing, dying."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sessions import SHARD_BYTES, leading_process, led, plan, shard

from flexkv import ArenaError
from flexkv.host.arena import ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.session import Session, Shard, attach, join, lead
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.system.available import Promise
from flexkv.types.mover import Status
from packages.conftest import PATIENCE_SECONDS
from packages.patience import wait_until


def listens(root: Path) -> bool:
    """Whether rank 0 can be reached."""
    with contextlib.suppress(OSError), RuntimeDirectory(str(root)) as directory:
        directory.connect("engine", PATIENCE_SECONDS, socket.SOCK_SEQPACKET).close()
        return True
    return False


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
            session.arena.board.report(cell, rank, Status.DONE)
        assert scheduler.arena.board.status(cell) is Status.DONE
        scheduler.close()
        joined[0].close()
    assert list(tmp_path.glob("*.sock")) == []


def test_others_do_not_wait_for_memory_that_rank_0_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.host.arena._LEFT_FREE", 0)
    growing = replace(plan(BlockFormat(2, (SHARD_BYTES,))), grows=True)
    session = lead(str(tmp_path), "engine", shard(0), 1, lambda *_: growing, threads=1)
    with contextlib.closing(session), contextlib.closing(attach(str(tmp_path), "engine")) as other:
        assert session.arena.spec.grows
        assert not other.arena.spec.grows


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


def test_the_stages_of_a_pipeline_have_layers_of_their_own(tmp_path: Path) -> None:
    """Of a rank in each of two stages, and of one in the second that has the first one's layers."""
    names = []
    for number, fingerprints in enumerate([("first", "second"), ("second", "first")]):
        name = f"engine{number}"
        others: list[Session] = []
        thread = threading.Thread(
            target=lambda name=name, other=fingerprints[1], others=others: others.append(
                join(str(tmp_path), name, Shard(1, other, 2, 2 * SHARD_BYTES, stage=1))
            )
        )
        thread.start()
        session = lead(str(tmp_path), name, shard(0, fingerprints[0]), 2, plan, threads=1)
        thread.join()
        assert session.arena.spec.format.shard_bytes == (SHARD_BYTES, 2 * SHARD_BYTES)
        assert others[0].info.fingerprint == session.info.fingerprint
        names.append(session.info.fingerprint)
        others[0].close()
        session.close()
    assert len({*names, "first", "second"}) == 4


def test_ranks_of_a_stage_that_disagree_stop_all(tmp_path: Path) -> None:
    refused: list[str] = []

    def follow(rank: int, fingerprint: str) -> None:
        with pytest.raises(ArenaError) as caught:
            join(str(tmp_path), "engine", shard(rank, fingerprint, stage=1))
        refused.append(str(caught.value))

    places = [(1, "second"), (2, "another")]
    threads = [threading.Thread(target=follow, args=place) for place in places]
    for thread in threads:
        thread.start()
    with pytest.raises(ArenaError, match=r"rank 2 .* has another KV cache than rank 1 "):
        lead(str(tmp_path), "engine", shard(0), 3, plan, threads=1)
    for thread in threads:
        thread.join()
    assert len(refused) == 2


def test_a_failed_plan_reaches_every_rank(tmp_path: Path) -> None:
    def no_memory(block_format: BlockFormat, promised: Sequence[Promise]) -> ArenaSpec:
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


def test_missing_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"ranks \[1, 2\] of engine 'engine' did not join"):
        lead(str(tmp_path), "engine", shard(0), 3, plan, threads=1, patience=0.2)


def test_no_session_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="rank 0 of engine 'nobody' does not answer"):
        attach(str(tmp_path), "nobody", patience=0.2)


SCHEDULER = """
import sys, time
from flexkv.session import attach
session = attach(sys.argv[1], "engine", patience=20)
print("attached", flush=True)
time.sleep(600)
"""


def test_a_second_scheduler_is_refused_while_the_first_lives_and_when_it_has_died(
    tmp_path: Path,
) -> None:
    """The first one's workers may copy into the slots that it gave out, as long as they live."""
    with led(tmp_path):
        command = [sys.executable, "-c", SCHEDULER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            try:
                assert first.stdout.readline() == "attached\n"
                refused = rf"handed to scheduler process {first.pid}, .* one scheduler in its life"
                with pytest.raises(ArenaError, match=refused):
                    attach(str(tmp_path), "engine")
            finally:
                first.kill()
        with pytest.raises(ArenaError, match=refused):
            attach(str(tmp_path), "engine")
    with led(tmp_path):  # new workers
        attach(str(tmp_path), "engine").close()


def test_a_scheduler_that_leaves_before_there_is_an_arena_does_not_use_it_up(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        thread = threading.Thread(target=lambda: stack.enter_context(led(tmp_path, ranks=2)))
        thread.start()
        wait_until(lambda: listens(tmp_path))
        with pytest.raises(ArenaError, match="disconnected: timed out"):
            attach(str(tmp_path), "engine", patience=0.5)
        join(str(tmp_path), "engine", shard(1)).close()
        thread.join()
        attach(str(tmp_path), "engine").close()


FORKING = """
import os, sys, time
from flexkv.host.arena import ArenaSpec
from flexkv.session import Shard, lead
session = lead(sys.argv[1], "engine", Shard(0, "same", 2, 8192), 1,
               lambda fmt, promised: ArenaSpec(fmt, 4), threads=1)
held = session.arena.slot_view(0)
child = os.fork()
if child == 0:
    session.close()
    held.release()
    print("child", os.getpid(), flush=True)
    time.sleep(600)
os.waitpid(child, 0)
"""


def test_a_forked_child_keeps_neither_name_nor_arena(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        try:
            proc = Path(f"/proc/{child}")
            assert "flexkv-arena" not in (proc / "maps").read_text()
            targets = [os.readlink(fd) for fd in (proc / "fd").iterdir()]
            assert not [t for t in targets if t.startswith(("socket:", "/memfd:", str(tmp_path)))]
            # What the child closed is still the parent's.
            with pytest.raises(ArenaError, match=f"owned by the living process {parent.pid};"):
                lead(str(tmp_path), "engine", shard(0), 1, plan, threads=1)
            attach(str(tmp_path), "engine").close()
            parent.kill()
            parent.wait()
            with led(tmp_path):
                attach(str(tmp_path), "engine").close()
        finally:
            parent.kill()
            os.kill(child, signal.SIGKILL)
