# SPDX-License-Identifier: Apache-2.0
"""What a killed client leaves behind: neither its fork server nor a process that reads from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from integration.harness import processes

ROOT = Path(__file__).parents[3]
ENGINE = "def prepare():\n    pass\n"
READS = "import os, sys\nos.read(int(sys.argv[1]), 1)\n"
CLIENT = """
import os, sys, time
from pathlib import Path
from integration.harness.fork_server import ForkServer
server = ForkServer(Path(sys.executable), "tiny_engine", os.environ)
read, write = os.pipe()
with open("log", "wb") as log:
    process = server.run("reads", os.environ, log.fileno(), passed=[read])
    server.run("sleeps", os.environ, log.fileno()).terminate()
os.close(read)
print(process.pid, server.pid, flush=True)
time.sleep(3600)
"""


def test_a_killed_client_ends_what_it_has_forked(tmp_path: Path) -> None:
    """An engine's driver reads commands so. A later fork holds no end of its pipe."""
    sources = {"tiny_engine": ENGINE, "reads": READS, "sleeps": "import time\ntime.sleep(600)\n"}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
    ) as client:
        assert client.stdout is not None
        groups = [int(word) for word in client.stdout.readline().split()]
        assert [bool(processes.group_pids(group)) for group in groups] == [True, True]
        client.send_signal(signal.SIGKILL)
    assert [processes.wait_until_gone(group, 60) for group in groups] == [[], []]
