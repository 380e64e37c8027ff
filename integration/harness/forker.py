# SPDX-License-Identifier: Apache-2.0
"""Imports vLLM once and forks a process for each engine; ``fork_server.ForkServer`` is the client.

Run as ``python -m integration.harness.forker CONTROL_FD``. An order on the control socket is JSON:
the environment of the process, and the arguments of vLLM's server, or null for a driver. With it
come descriptors: its log, and of a driver the command pipe and the event pipe. The fork answers
with its pid and a descriptor of its process. The end of the control socket ends this process;
drivers end with their own command pipes, servers by SIGTERM.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from integration.harness import driver

# Longest order in bytes: an environment. Linux takes packets of up to about 200 KB.
MAX_ORDER = 1 << 17
_DESCRIPTORS = 3

_SERVER = "vllm.entrypoints.openai.api_server"

# vLLM imports these while an engine or a server starts.
_IMPORTED_LATE = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is given.

    ``arguments`` are those of vLLM's server; None for a driver. ``pipes`` are descriptors of a
    driver's two pipes.
    """

    environment: dict[str, str]
    arguments: list[str] | None
    log_fd: int
    pipes: Sequence[int]


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
            log_fd, *pipes = descriptors
            return Order(**json.loads(message), log_fd=log_fd, pipes=pipes)
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def carry_out(order: Order) -> int:
    """Serve one engine as if this process had been started for it; returns the exit status."""
    os.environ.clear()
    os.environ.update(order.environment)
    for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(order.log_fd, stream)
    os.close(order.log_fd)
    if order.arguments is None:
        return asyncio.run(driver.main(*order.pipes))
    sys.argv = [_SERVER, *order.arguments]
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)
    return 0


def have_vllm_fork() -> None:
    """Have vLLM fork its processes also on CPUs.

    That is vLLM's default, but its platform of CPUs sets the environment variable to "spawn"
    whenever it completes a configuration.
    """
    from vllm.platforms import current_platform

    complete = current_platform.check_and_update_config

    def and_fork(config: object) -> None:
        complete(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    type(current_platform).check_and_update_config = staticmethod(and_fork)


def _reap() -> None:
    """Collect drivers that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def main() -> int:
    """Import vLLM, then serve the control socket named on the command line."""
    control = socket.socket(fileno=int(sys.argv[1]))
    have_vllm_fork()
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    # The collector would otherwise write to, and so copy, every page in each fork.
    gc.collect()
    gc.freeze()
    order = serve(control)
    if order is None:
        # At the interpreter's end, libraries of vLLM would print what they leak.
        os._exit(0)
    return carry_out(order)


if __name__ == "__main__":
    sys.exit(main())
