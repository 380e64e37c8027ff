# SPDX-License-Identifier: Apache-2.0
"""Commands that get SIGTERM leave no process and no folder behind."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integration.harness import processes

ROOT = Path(__file__).parents[1]
COMMAND = """
import os, signal, sys, tempfile
from pathlib import Path
from integration.harness.http_server import HttpServer, spawned
from integration.interrupts import interrupt_at_sigterm

SERVER = '''
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
'''

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever runs the tests
interrupt_at_sigterm()
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
    start, log = spawned([sys.executable, "-c", SERVER]), Path(folder) / "log"
    with HttpServer("toy", start, {}, os.environ, log) as server:
        try:
            print(server.group, flush=True)
            sys.stdin.readline()
        finally:
            print("ending", flush=True)
            sys.stdin.readline()
            print("ended", flush=True)
"""
CALLER = """
import signal, subprocess, sys
from integration.interrupts import interrupt_at_sigterm
signal.signal(signal.SIGHUP, signal.SIG_DFL)
interrupt_at_sigterm(forward=True)
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
try:
    child.wait()
except KeyboardInterrupt:
    child.wait()
"""
FORK = """
import os, signal, sys
from integration.interrupts import interrupt_at_sigterm
signal.signal(signal.SIGHUP, signal.SIG_IGN)
interrupt_at_sigterm()
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
began, begun = os.pipe()
if pid := os.fork():
    os.read(began, 1)  # Python forgets signals that come within fork
    os.kill(pid, signal.SIGTERM)
    sys.exit(os.WTERMSIG(os.waitpid(pid, 0)[1]))
os.write(begun, b"x")
signal.pause()
"""
NO_PROCESSES = {
    "integration.lanes": "it starts none",
    "integration.lanes.quick": "its tests start no engine",
    "pytest": "the root's conftest.py",
}
"""Commands of the noxfile that need none of it, or have it elsewhere."""


@pytest.mark.parametrize("called", [False, True], ids=["a command", "a command of nox"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_ends_what_it_has_started(
    tmp_path: Path, number: signal.Signals, called: bool
) -> None:
    arguments = [*([CALLER] if called else []), COMMAND, str(tmp_path)]
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", *arguments]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        server = int(process.stdout.readline())
        try:
            assert processes.group_pids(server)
            process.send_signal(number)
            assert process.stdout.readline() == "ending\n"
            process.send_signal(number)  # ending goes on
            process.stdin.write("\n")
            process.stdin.close()
            assert process.stdout.read() == "ended\n"
            process.wait()
            assert not processes.group_pids(server)
            assert not list(tmp_path.iterdir())
        finally:
            processes.kill_group(server)


def test_a_fork_ends_at_once_and_nohup_holds() -> None:
    ended = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, check=False)
    assert ended.returncode == signal.SIGTERM


def test_all_commands_of_nox_end_so() -> None:
    text = (ROOT / "noxfile.py").read_text()
    names = set(re.findall(r'"-m", "((?:integration|mutants|pytest)[\w.]*)"', text))
    assert names > NO_PROCESSES.keys()
    for name in names - NO_PROCESSES.keys():
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec is not None
        assert spec.origin is not None
        assert "\n    interrupt_at_sigterm()\n" in Path(spec.origin).read_text(), name
