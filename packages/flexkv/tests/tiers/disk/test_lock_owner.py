# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_folders import OURS
from pid_namespaces import ELSEWHERE, in_a_namespace

from flexkv.tiers.disk.folder import claim, describe_owner
from flexkv.types.errors import DiskError

CLAIM = """
import os, sys
from flexkv.tiers.disk.folder import claim
try:
    claim(sys.argv[1], sys.argv[2], 1)
except Exception as error:
    print(error, flush=True)
else:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
SERVER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_an_owner_whose_server_was_killed_is_named(tmp_path: Path) -> None:
    arguments = (sys.executable, "-c", SERVER, CLAIM, str(tmp_path), OURS)
    with started(*arguments) as server:
        owner = int(first_line(server))
        with pytest.raises(DiskError, match=f"in use by process {owner}; allowed"):
            claim(str(tmp_path), OURS, 1)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        said = f"by process {owner}, whose parent process {server.pid} has died (end it if that was"
        with pytest.raises(DiskError, match=re.escape(said)):
            claim(str(tmp_path), OURS, 1)
        assert server.stdin is not None
        server.stdin.close()  # the owner ends


def test_an_owner_in_another_container_is_not_named_by_a_number_of_ones_own(tmp_path: Path) -> None:
    command = in_a_namespace(sys.executable, "-c", CLAIM, str(tmp_path), OURS)
    with started(*command) as owner:
        assert first_line(owner) == "1"
        said = rf"in use by process \d+ \(1 {ELSEWHERE}\); allowed"
        with pytest.raises(DiskError, match=said):
            claim(str(tmp_path), OURS, 1)


def test_an_owner_outside_of_the_container_is_named_so(tmp_path: Path) -> None:
    folder = claim(str(tmp_path), OURS, 1)
    with started(*in_a_namespace(sys.executable, "-c", CLAIM, str(tmp_path), OURS)) as other:
        assert f"in use by process {os.getpid()} {ELSEWHERE}; allowed" in first_line(other)
    folder.release()


def test_a_lock_that_says_nothing_has_an_unknown_owner(tmp_path: Path) -> None:
    assert describe_owner(str(tmp_path)) == "unknown"
    (tmp_path / "lock").write_bytes(b"")
    assert describe_owner(str(tmp_path)) == "unknown"
    (tmp_path / "lock").write_bytes(b"\xff")
    assert describe_owner(str(tmp_path))
