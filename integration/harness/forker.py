# SPDX-License-Identifier: Apache-2.0
"""Imports an engine once and forks a process for each start; ``fork_server.ForkServer`` is the
client.

Run as ``python -m integration.harness.forker CONTROL_FD ENGINE``. ``ENGINE`` is a module whose
``prepare`` imports the engine and has it fork its own processes. An order on the control socket is
JSON: a module to run as a command, its arguments, and the environment. With it come descriptors: a
log, and those whose numbers are further arguments. The fork answers with its pid and a descriptor
of its process. The end of the control socket ends this process, and none that it has forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Longest order in bytes: an environment. Linux takes packets of up to about 200 KB.
MAX_ORDER = 1 << 17
_DESCRIPTORS = 3
_SELF = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is given.

    ``module`` is run as ``python -m`` does, with ``arguments`` and then the numbers of ``passed``,
    descriptors that it owns.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    log_fd: int
    passed: Sequence[int]


def serve(control: socket.socket) -> Order | None:
    """Fork a process for each order. Returns the order in each fork, and None in this process once
    the client has gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_ORDER, _DESCRIPTORS)
        if not message:
            return None
        if os.fork() == 0:
            os.setpgrp()
            me = os.pidfd_open(os.getpid())
            socket.send_fds(control, [str(os.getpid()).encode()], [me])
            os.close(me)
            control.close()
            log_fd, *passed = descriptors
            return Order(**json.loads(message), log_fd=log_fd, passed=passed)
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def carry_out(order: Order) -> None:
    """Run a command as if this process had been started for it; SystemExit is its end."""
    _take_environment(order.environment)
    for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(order.log_fd, stream)
    os.close(order.log_fd)
    sys.argv = [order.module, *order.arguments, *map(str, order.passed)]
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def _take_environment(environment: dict[str, str]) -> None:
    """Replace the environment, but for variables that the imports have set: they would have set
    them in a process of this environment, too."""
    entries = (_SELF / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
    given = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    set_since = {name: value for name, value in os.environ.items() if given.get(name) != value}
    os.environ.clear()
    os.environ.update(set_since | environment)
    # Python reads PYTHONPATH when it starts.
    wanted = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [folder for folder in wanted if folder not in sys.path]


def refuse_threads() -> None:
    """Raises RuntimeError if this process has more than one thread: a fork has only the one that
    forked, and locks that another one held are never released in it."""
    threads = len(list((_SELF / "task").iterdir()))
    if threads > 1:
        raise RuntimeError(f"no fork is safe: threads that the import has begun: {threads - 1}")


def _reap() -> None:
    """Collect processes that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def main() -> None:
    """Import the engine, then serve the control socket; both are named on the command line."""
    descriptor, engine = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    importlib.import_module(engine).prepare()
    refuse_threads()
    # The collector would otherwise write to, and so copy, every page in each fork.
    gc.collect()
    gc.freeze()
    order = serve(control)
    if order is None:
        # At the interpreter's end, libraries of an engine would print what they leak.
        os._exit(0)
    carry_out(order)


if __name__ == "__main__":
    main()
