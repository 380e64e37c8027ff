# SPDX-License-Identifier: Apache-2.0
"""The runtime directory: whose it is, who listens in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import leading_process, led, plan, shard

from flexkv import ArenaError
from flexkv.session import attach, lead, runtime_directory
from flexkv.session.runtime_directory import RuntimeDirectory

NOBODY = 65534
USER = 12345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def umask_0() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can look into."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def refused(path: Path, why: str) -> None:
    """Neither rank 0 nor a client uses it."""
    with pytest.raises(ArenaError, match=rf"runtime_dir .* cannot be used: {why}"):
        lead(str(path), "engine", shard(0), 1, plan, threads=1)
    with pytest.raises(ArenaError, match=rf"runtime_dir .* cannot be used: {why}"):
        attach(str(path), "engine", patience=600)


@pytest.mark.usefixtures("umask_0")
def test_socket_and_directory_are_private(tmp_path: Path) -> None:
    root = tmp_path / "new" / "runtime"
    with led(root):
        (path,) = root.glob("*.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert stat.S_IMODE(root.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE((root / "lock").stat().st_mode) == 0o600


def test_unwritable_directory_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ArenaError, match=r"runtime_dir '.*file/below' cannot be used: .*; allowed"):
        lead(str(file / "below"), "engine", shard(0), 1, plan, threads=1)


def test_a_long_directory_works(tmp_path: Path) -> None:
    with led(tmp_path / ("x" * 200)):
        attach(str(tmp_path / ("x" * 200)), "engine").close()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "run"
    root.mkdir()
    root.chmod(mode)
    refused(root, f"{root} has mode {mode:o}, others can write to it")
    root.chmod(0o755)
    with led(root):
        attach(str(root), "engine").close()


@needs_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir(mode=0o700)
    os.chown(root, NOBODY, NOBODY)
    refused(root, f"{root} belongs to user {NOBODY}")


@needs_root
def test_a_directory_of_root_is_not_a_users(open_folder: Path) -> None:
    assert f"cannot be used: {open_folder} belongs to user 0;" in lead_as_user(open_folder)


@needs_root
def test_a_directory_that_others_can_replace_is_refused(open_folder: Path) -> None:
    above = open_folder / "above"
    root = above / "mine" / "run"
    root.mkdir(parents=True)
    for folder in (root, root.parent):
        os.chown(folder, USER, USER)
        folder.chmod(0o700)
    above.chmod(0o777)
    assert lead_as_user(root) == "led"  # root's: nobody can do what root does not want
    os.chown(above, NOBODY, NOBODY)
    above.chmod(0o755)
    assert f"cannot be used: {above} belongs to user {NOBODY};" in lead_as_user(root)
    os.chown(above, USER, USER)
    above.chmod(0o770)
    assert f"cannot be used: {above} has mode 770, others can" in lead_as_user(root)
    above.chmod(0o1777)
    assert lead_as_user(root) == "led"
    os.chown(above, NOBODY, NOBODY)  # who may rename what others have there
    assert f"cannot be used: {above} belongs to user {NOBODY};" in lead_as_user(root)


def test_a_link_is_not_the_directory_but_may_lead_to_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "run").mkdir(parents=True, mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with led(tmp_path / "link" / "run"):
        attach(str(tmp_path / "real" / "run"), "engine").close()
    (tmp_path / "run").symlink_to(tmp_path / "real" / "run")
    for path in (f"{tmp_path}/run", f"{tmp_path}/run/"):
        with pytest.raises(ArenaError, match=r"Not a directory.*no symbolic link"):
            lead(path, "engine", shard(0), 1, plan, threads=1)


def test_a_directory_below_a_link_to_nothing_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ArenaError, match=r"runtime_dir .* cannot be used: .*No such file"):
        lead(str(tmp_path / "link" / "run"), "engine", shard(0), 1, plan, threads=1)


def test_files_behind_links_are_not_touched(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    root = tmp_path / "run"
    root.mkdir(mode=0o700)
    (root / "lock").symlink_to(precious)
    with pytest.raises(ArenaError, match="is a symbolic link: 'lock'"):
        lead(str(root), "engine", shard(0), 1, plan, threads=1)
    (root / "lock").unlink()
    os.mkfifo(root / "lock")
    with pytest.raises(ArenaError, match="is not a regular file: 'lock'"):
        lead(str(root), "engine", shard(0), 1, plan, threads=1)
    (root / "lock").unlink()
    (root / "a.sock").symlink_to(precious)
    (root / "b.sock").write_text("no socket")
    with led(root):
        pass
    assert {path.name for path in root.iterdir()} == {"lock", "a.sock", "b.sock"}
    assert precious.read_text() == "precious"


def test_a_lock_that_is_not_given_back_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_directory, "_LOCK_SECONDS", 0.1)
    with led(tmp_path, "other"), (tmp_path / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ArenaError, match=r"holds 'lock' .* for 0 s; allowed: to start again"):
            lead(str(tmp_path), "engine", shard(0), 1, plan, threads=1)
    with led(tmp_path):
        pass


def test_a_child_that_was_forked_under_the_lock_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_directory, "_LOCK_SECONDS", 0.1)
    with RuntimeDirectory(str(tmp_path)) as opened:
        copies = []
        real = opened._sweep
        # As in a child, what is copied is the same open file.
        monkeypatch.setattr(
            opened, "_sweep", lambda: (copies.append(os.dup(lock_of(tmp_path))), real())
        )
        opened.listen("engine").close()
    with led(tmp_path):
        pass
    os.close(*copies)


def lock_of(root: Path) -> int:
    """This process's descriptor of the lock in `root`."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}") == str(root / "lock"):
                return int(name)
    raise AssertionError("not open")


def test_a_stopped_engine_costs_others_nothing(tmp_path: Path) -> None:
    """More starts than its queue has room for: each asks whether it lives."""
    with leading_process(tmp_path, "stopped") as owner:
        os.kill(owner.pid, signal.SIGSTOP)
        kind, owned = socket.SOCK_SEQPACKET, "'stopped' is owned by the living process"
        with RuntimeDirectory(str(tmp_path)) as opened:
            for _ in range(100):
                opened.listen("other", kind).close()
            with pytest.raises(ArenaError, match=f"{owned} {owner.pid}"):
                opened.listen("stopped", kind)
            for _ in range(100):
                with pytest.raises(ArenaError, match=owned) as raised:
                    opened.listen("stopped", kind)
            assert "living process that does not answer" in str(raised.value)
        with pytest.raises(ArenaError, match="rank 0 of engine 'stopped' does not answer"):
            attach(str(tmp_path), "stopped", patience=0.1)
        os.kill(owner.pid, signal.SIGCONT)
        attach(str(tmp_path), "stopped").close()


def test_what_cannot_be_asked_is_taken_for_alive(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as strange:
        strange.bind(str(tmp_path / "strange.sock"))
        with led(tmp_path):
            assert (tmp_path / "strange.sock").exists()


LISTENER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.chdir(sys.argv[1])  # the address of a socket has 107 bytes at most
listener.bind(sys.argv[2])
os.setgid(65534); os.setuid(65534)
listener.listen()
print("listening", flush=True)
listener.accept()
"""


@needs_root
def test_a_socket_at_which_another_user_listens_is_refused(tmp_path: Path) -> None:
    with led(tmp_path):
        (path,) = tmp_path.glob("*.sock")
    command = [sys.executable, "-c", LISTENER, str(tmp_path), path.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listening\n"
        why = f"process {other.pid} of user {NOBODY} listens there"
        with pytest.raises(ArenaError, match=why):
            attach(str(tmp_path), "engine", patience=600)
        other.kill()


LEAD = """
import os, sys
from flexkv import ArenaError
from flexkv.host.arena import ArenaSpec
from flexkv.session import Shard, lead
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
try:
    lead(sys.argv[1], "engine", Shard(0, "same", 2, 8192), 1,
         lambda fmt, promised: ArenaSpec(fmt, 4), threads=1).close()
    print("led")
except ArenaError as error:
    print(error)
"""


def lead_as_user(root: Path) -> str:
    """What comes of leading a session as USER."""
    command = [sys.executable, "-c", LEAD, str(root), str(USER)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
